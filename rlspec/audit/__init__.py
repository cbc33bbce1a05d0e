"""The statistics and verdicts that show speculation to be lossless; they run no engine."""

"""What is measured on data: what a model is fed, ranges, verdicts. Everything here runs models."""

"""The doctor: obstacles to fast half precision in a machine or a model, and the remedy for each."""

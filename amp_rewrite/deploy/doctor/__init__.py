"""The doctor: what keeps a machine or a model from fast half precision, and the remedy for each."""

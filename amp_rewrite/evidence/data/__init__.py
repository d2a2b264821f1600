"""Input data: feeds from files, folders and generators."""

"""Settings: policies, op lists, selectors, options, and the files and variables that state them."""

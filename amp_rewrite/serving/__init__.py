"""Sessions that convert what they load, the cache of what they converted, and the settings of the process."""

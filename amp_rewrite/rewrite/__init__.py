"""Models from models: passes, operator fusion, applying a plan, checking the result."""

"""Deployment: sessions that convert what they load, the doctor, and the bench."""

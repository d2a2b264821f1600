"""What is spelled out before painting: functions, the Casts behind CastLike, the selections behind masks."""

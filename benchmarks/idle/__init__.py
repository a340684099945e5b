"""Whether reported idle time is true, and what measuring it costs."""

"""A lost database made anew from what the brokers keep."""

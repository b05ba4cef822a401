"""Seeing what happens: logs, metrics, traces, error reports. What needs another package is imported when asked for."""

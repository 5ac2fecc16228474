"""Connections to agents and to supervisors: one handle for each, orders and reports."""

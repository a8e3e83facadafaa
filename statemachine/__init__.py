"""What happens, in which order: states, machine, round, planner, validation, recovery."""

"""The planner: from what was measured to a placement, its prediction and its reasons. Pure."""

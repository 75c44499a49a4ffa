"""attngraph beside other engines; `suite` says how."""

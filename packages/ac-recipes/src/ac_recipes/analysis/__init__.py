"""What a recipe will take and whether it is right, found out without training it: the work of the command line's
`verify`, `compare`, `trace`, `estimate` and `plan`, through the public functions of ac-core."""

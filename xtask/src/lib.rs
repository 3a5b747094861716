//! Project tasks: test matrix, tidy checks, continuous integration.

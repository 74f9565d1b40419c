//! Pictures of programs, for Graphviz.

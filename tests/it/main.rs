<<<<<<< HEAD
//! The integration tests, one binary.
=======
//! One binary for all integration tests.
>>>>>>> wt-a

mod equivalence;
mod errors;
mod filetests;
mod generate;
mod goldens;
<<<<<<< HEAD
=======
mod random;
>>>>>>> wt-a
mod reference;
mod text;

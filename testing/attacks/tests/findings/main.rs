//! Proofs of the security review, repeated against the built programs.
//!
//! Each test measures how an attack affects a neighbour. Limits of time are those of the finding
//! with `TESSERA_ATTACKS_STRICT=1` (`make bench-attacks`), and longer by a factor otherwise; limits
//! of memory, CPU time and counts are always the same.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod connections;
mod fairness;
mod harness;
mod locks;
mod selectors;
mod shares;
mod slices;

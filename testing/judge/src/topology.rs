//! How well sets of GPUs are chosen on real machines, against what others choose and against a
//! clairvoyant.
//!
//! ```text
//! machines::read (link matrices) -> LinkMatrix -> policies: sets for a request
//!                                       |             |-> per_request  every set of free GPUs, one request
//!                                       |             |-> sequence     requests until the first that does not fit
//!                                       |             '-> speed        how long one decision takes
//!                                       '-> clairvoyant: the best that can be done with a sequence known in advance
//! ```
//!
//! The score of a pair is 100 for each NVLink plus one PCIe level (`SYS` 10 to same board 60), of a
//! set the sum over its pairs.

mod best_effort;
mod clairvoyant;
pub mod machines;
pub mod per_request;
pub mod policies;
mod random;
pub mod sequence;
pub mod speed;

pub use clairvoyant::Clairvoyant;

/// Machines with more GPUs are only timed: all their sets of free GPUs, and the clairvoyant, are
/// out of reach.
pub const MAX_ENUMERATED: usize = 16;

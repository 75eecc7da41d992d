//! Placement quality: replays a published trace of pods on a cluster, one pod at a time.
//!
//! The traces are those of FGD's artefact ("Beware of Fragmentation", ATC'23), or others in that
//! format.

pub mod best_fit;
pub mod churn;
pub mod cluster;
pub mod engine;
pub mod fgd;
pub mod fill;
pub mod least_fragmentation;
pub mod placer;
pub mod policy;
pub mod trace;
pub mod violation;

//! Placement quality: a published trace of pods, replayed against a cluster, one pod at a time.
//!
//! The traces are those of the artefact of FGD ("Beware of Fragmentation", ATC'23), or others in that format.

pub mod trace;

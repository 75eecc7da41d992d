//! Attacks on Tessera's availability, against the built programs: proofs of the security review in
//! `tests`, and a random attacker.
//!
//! ```text
//! AttackedCluster: tessera-simcluster serve          (child process)
//!   |-- API server, controllers, scheduler, kubelets   simulated
//!   |-- tessera-controller, tessera-driver per node    real; measured through /proc
//!
//! attack: observer (every change of every claim), honest namespace (latency),
//!         hostile namespace (workers that create, change and delete) -> report
//! ```
//!
//! `README.md` lists each finding with the test that repeats its proof.

#![forbid(unsafe_code)]

pub mod attack;
pub mod bounds;
pub mod cluster;
pub mod objects;
pub mod processes;

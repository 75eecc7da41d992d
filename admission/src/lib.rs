//! The admission webhook that converts pods of other GPU-sharing systems.
//!
//! ```text
//! kube-apiserver --AdmissionReview--> review --Converter (tessera-dialect)--> patch, warnings | refusal
//!                <--webhooks-- configuration --caBundle-- certificates
//! ```
//!
//! Everything here is without I/O: the controller serves [`review`], and writes what
//! [`configuration`] and [`certificates`] return.

#![forbid(unsafe_code)]

pub mod certificates;
pub mod configuration;
pub mod review;

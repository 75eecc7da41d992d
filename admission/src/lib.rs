//! The admission webhook: it converts pods of other GPU-sharing systems, and validates GpuConfigs.
//!
//! ```text
//! kube-apiserver --AdmissionReview--> review --Converter (tessera-dialect)--> patch, warnings | refusal
//!                --AdmissionReview--> validate --GpuConfig (tessera-api)--> allowed | refusal
//!                <--webhooks-- configuration --caBundle-- certificates
//! ```
//!
//! Everything here is without I/O: the controller serves [`review`] and [`validate`], and writes
//! what [`configuration`] and [`certificates`] return.

#![forbid(unsafe_code)]

pub mod certificates;
pub mod configuration;
pub mod review;
pub mod validate;

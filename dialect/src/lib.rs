//! Pods of other GPU-sharing systems as claims.
//!
//! ```text
//! pod, settings, namespace --dialects::*::read--> PodAsk --claim--> ResourceClaimTemplateSpec, name
//!                                                        --patch--> JSON patch of the pod
//! ```
//!
//! A dialect is the set of resource names, annotations and variables by which pods ask one system
//! for GPUs. Each has a module that reads a pod and returns a [`PodAsk`](ask::PodAsk): GPUs, memory
//! and compute of each container, in units of Tessera. What follows is the same for all: one claim
//! per pod with one request per container, a template named by its content, and a patch that
//! removes the names of the dialect from the pod and adds the claim.
//!
//! Everything here is pure: no I/O, no clock, no client. The admission webhook, `kubectl tessera
//! convert` and the controller, which makes the templates, call the same function and get the same
//! result.

#![forbid(unsafe_code)]

mod admission;
pub mod ask;
mod claim;
mod convert;
mod description;
mod dialects;
mod name;
mod original;
mod patch;
mod pod;
mod refusal;
mod selector;
pub mod settings;

pub use admission::{AdmissionRule, AdmissionTask};
pub use claim::{TEMPLATE_PREFIX, Template};
pub use convert::{
    Conversion, ConversionError, Converter, LeaveReason, ManifestForm, NamespaceView, Verdict,
};
pub use description::{DialectDescription, descriptions};
pub use dialects::Trigger;
pub use dialects::mig::profile_of_resource as mig_profile_of_resource;
pub use name::{DIALECT_LABEL, Dialect, NO_DIALECT};
pub use original::{CONVERTED_ANNOTATION, Original, OriginalError};
pub use refusal::PodRefusal;
pub use settings::{Settings, SettingsError};

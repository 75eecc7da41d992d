//! Identities that a claim's allocation brings along.

use std::fmt;

use super::NameError;
use super::macros::{kept_if, name_type};
use super::syntax::is_lowercase_uuid;

name_type! {
    /// A claim's UID. Kubernetes makes UUIDs, and calls them opaque; since ours become names of
    /// files and CDI devices, only text that is harmless there is taken.
    ClaimUid, "claim UID", at most 128,
    "letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit",
    kept_if!(is_harmless_uid)
}

name_type! {
    /// One share of a device that takes several allocations: a lowercase RFC 4122 UUID
    /// (`ResourceClaim.status.allocation.devices.results[].shareID`).
    ShareId, "share id", at most 36,
    "a UUID in lowercase, such as `1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77`",
    kept_if!(is_lowercase_uuid)
}

fn is_harmless_uid(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Identifies one result of a claim's allocation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResultId {
    /// The share that the result carries.
    Share(ShareId),
    /// The position in `results`, for an exclusive device, which has no share.
    Index(usize),
}

impl fmt::Display for ResultId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Share(share) => write!(f, "{share}"),
            Self::Index(index) => write!(f, "{index}"),
        }
    }
}

/// The name of what one allocation result becomes on the node: `<claim UID>-<share id>`, or `<claim
/// UID>-<index>` for an exclusive device. It names the CDI device of kind
/// [`CDI_CLAIM_KIND`](super::CDI_CLAIM_KIND) and the directory `/dev/tessera/<name>` in the
/// container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimDeviceName {
    claim: ClaimUid,
    result: ResultId,
}

impl ClaimDeviceName {
    /// The name for one result of the claim.
    pub fn new(claim: ClaimUid, result: ResultId) -> Self {
        Self { claim, result }
    }

    /// The name for the result at `index` that carries `share_id`, as read from the API.
    ///
    /// # Errors
    /// The share id is not a lowercase UUID.
    pub fn of_result(
        claim: &ClaimUid,
        index: usize,
        share_id: Option<&str>,
    ) -> Result<Self, NameError> {
        let result = match share_id {
            Some(share) => ResultId::Share(ShareId::new(share)?),
            None => ResultId::Index(index),
        };
        Ok(Self::new(claim.clone(), result))
    }

    /// The claim.
    pub fn claim(&self) -> &ClaimUid {
        &self.claim
    }

    /// Returns the result of the claim that it names.
    pub fn result(&self) -> &ResultId {
        &self.result
    }

    /// The fully qualified CDI device, `k8s.gpu.tessera.dev/claim=<name>`.
    pub fn cdi_id(&self) -> String {
        format!("{}={self}", super::CDI_CLAIM_KIND)
    }
}

impl fmt::Display for ClaimDeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.claim, self.result)
    }
}

//! Versions of the CDI specification, and the version that a spec needs.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::spec::{ContainerEdits, Spec};

/// A released version of the CDI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Version {
    /// 0.3.0, the first that runtimes implement.
    V0_3,
    /// 0.4.0: mount types.
    V0_4,
    /// 0.5.0: `hostPath` of device nodes, device names that start with a digit.
    V0_5,
    /// 0.6.0: annotations, dots in classes.
    V0_6,
    /// 0.7.0: Intel RDT, additional groups.
    V0_7,
    /// 0.8.0: no new field.
    V0_8,
    /// 1.0.0: no new field.
    V1_0,
    /// 1.1.0: network devices.
    V1_1,
}

/// Lowest declared version. Names of claims may start with a digit, and every runtime that supports
/// DRA supports 0.5.0.
const LOWEST_DECLARED: Version = Version::V0_5;

const ALL: [(Version, &str); 8] = [
    (Version::V0_3, "0.3.0"),
    (Version::V0_4, "0.4.0"),
    (Version::V0_5, "0.5.0"),
    (Version::V0_6, "0.6.0"),
    (Version::V0_7, "0.7.0"),
    (Version::V0_8, "0.8.0"),
    (Version::V1_0, "1.0.0"),
    (Version::V1_1, "1.1.0"),
];

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, text) = ALL
            .iter()
            .find(|(version, _)| version == self)
            .expect("invariant: ALL lists every variant");
        f.write_str(text)
    }
}

/// Error of a `cdiVersion` that is not a released version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unsupported cdiVersion `{0}` (supported: 0.3.0 to 1.1.0)")]
pub struct UnknownVersion(String);

impl FromStr for Version {
    type Err = UnknownVersion;

    fn from_str(text: &str) -> Result<Self, UnknownVersion> {
        let bare = text.strip_prefix('v').unwrap_or(text);
        let found = ALL.iter().find(|(_, name)| *name == bare);
        found.map(|(version, _)| *version).ok_or_else(|| UnknownVersion(text.to_owned()))
    }
}

impl TryFrom<String> for Version {
    type Error = UnknownVersion;

    fn try_from(text: String) -> Result<Self, UnknownVersion> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

/// Returns the lowest version that has every field and name of `spec`.
pub(crate) fn required(spec: &Spec) -> Version {
    let annotated = !spec.annotations.is_empty()
        || spec.devices.iter().any(|device| !device.annotations.is_empty());
    let dotted = spec.kind.class().contains('.');

    let for_edits = spec.all_edits().map(required_by_edits).max().unwrap_or(Version::V0_3);
    let for_names = if annotated || dotted {
        Version::V0_6
    } else if spec
        .devices
        .iter()
        .any(|device| device.name.as_str().starts_with(|c: char| c.is_ascii_digit()))
    {
        Version::V0_5
    } else {
        Version::V0_3
    };
    for_edits.max(for_names)
}

fn required_by_edits(edits: &ContainerEdits) -> Version {
    if !edits.additional_gids.is_empty() {
        Version::V0_7
    } else if edits.device_nodes.iter().any(|node| node.host_path.is_some()) {
        Version::V0_5
    } else if edits.mounts.iter().any(|mount| mount.kind.is_some()) {
        Version::V0_4
    } else {
        Version::V0_3
    }
}

impl Spec {
    /// Returns the version to declare: the lowest that the content needs, but at least 0.5.0.
    #[must_use]
    pub fn minimum_version(&self) -> Version {
        required(self).max(LOWEST_DECLARED)
    }
}

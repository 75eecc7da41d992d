//! The file with the DeviceTaintRules, as the chart creates them.

use std::path::{Path, PathBuf};

use k8s_openapi::api::resource::v1::{DeviceTaintRule, DeviceTaintRuleSpec};
use tessera_api::names::{DRIVER_NAME, DriverName, FENCE_POLICY, MANAGED_TAINT_KEY, NO_SCHEDULE};
use tessera_api::slice::fenced_driver;

/// Errors of the file.
#[derive(Debug, thiserror::Error)]
pub enum FenceFileError {
    /// The file cannot be read.
    #[error("cannot read --fence-rules {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is not a YAML list of DeviceTaintRules.
    #[error("--fence-rules {}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The problem, with line and column.
        problem: String,
    },
    /// An object is no fence.
    #[error(
        "--fence-rules {}: [{index}] must have metadata.name, spec.deviceSelector with the driver alone, and spec.taint {MANAGED_TAINT_KEY}:{NO_SCHEDULE}",
        path.display()
    )]
    NotAFence {
        /// The file.
        path: PathBuf,
        /// The place in the list, from 0.
        index: usize,
    },
}

/// A DeviceTaintRule that keeps kube-scheduler from all devices of a driver.
#[derive(Debug, Clone, PartialEq)]
pub struct FenceRule {
    name: String,
    driver: DriverName,
    object: DeviceTaintRule,
}

impl FenceRule {
    /// Returns the rule; `None` if it has no name or is no fence.
    #[must_use]
    pub fn new(object: DeviceTaintRule) -> Option<Self> {
        let name = object.metadata.name.clone()?;
        let driver = fenced_driver(&object)?;
        Some(Self { name, driver, object })
    }

    /// Returns the driver whose devices it keeps from kube-scheduler.
    #[must_use]
    pub fn driver(&self) -> &DriverName {
        &self.driver
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the ValidatingAdmissionPolicy that protects it.
    #[must_use]
    pub fn policy(&self) -> String {
        match self.driver.as_str() {
            DRIVER_NAME => FENCE_POLICY.to_owned(),
            driver => format!("{FENCE_POLICY}.{driver}"),
        }
    }

    /// Returns its spec.
    #[must_use]
    pub fn spec(&self) -> &DeviceTaintRuleSpec {
        &self.object.spec
    }

    /// Returns the object.
    #[must_use]
    pub fn object(&self) -> &DeviceTaintRule {
        &self.object
    }
}

/// Reads the file.
///
/// # Errors
/// [`FenceFileError`].
pub fn read(path: &Path) -> Result<Vec<FenceRule>, FenceFileError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| FenceFileError::Unreadable { path: path.to_owned(), source })?;
    let objects: Vec<DeviceTaintRule> = serde_saphyr::from_str(&text).map_err(|error| {
        FenceFileError::Malformed { path: path.to_owned(), problem: error.to_string() }
    })?;
    let rules = objects.into_iter().enumerate().map(|(index, object)| {
        FenceRule::new(object)
            .ok_or_else(|| FenceFileError::NotAFence { path: path.to_owned(), index })
    });
    rules.collect()
}

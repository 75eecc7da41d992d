//! Claims recorded on disk across kubelet restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_proto::dra_v1;
use tessera_runtime::atomic_file;

/// Namespace and name of a claim.
pub(crate) type ClaimKey = (String, String);

/// A claim that is prepared, or being prepared, on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimInfo {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// UIDs of this node's pods that use it.
    pub(crate) pods: BTreeSet<String>,
    /// Drivers of the allocation, with the devices each returned.
    pub(crate) drivers: BTreeMap<String, Vec<PreparedDevice>>,
    /// True after all drivers have answered. Not in the checkpoint: a restarted kubelet calls
    /// NodePrepareResources again, since it does not know if an unprepare was under way
    /// (`newClaimInfoFromState` in `pkg/kubelet/cm/dra/claiminfo.go`, Kubernetes 1.37).
    #[serde(skip)]
    pub(crate) prepared: bool,
    #[serde(skip)]
    pub(crate) unpreparing: bool,
}

/// One device of a driver's response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PreparedDevice {
    pub(crate) pool: String,
    pub(crate) device: String,
    pub(crate) requests: Vec<String>,
    pub(crate) cdi_ids: Vec<String>,
}

impl ClaimInfo {
    pub(crate) fn key(&self) -> ClaimKey {
        (self.namespace.clone(), self.name.clone())
    }

    /// Returns the claim as it is sent to a driver.
    pub(crate) fn to_proto(&self) -> dra_v1::Claim {
        dra_v1::Claim {
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            name: self.name.clone(),
        }
    }

    /// Returns the devices for a container that uses `request` of the claim, or all of it.
    pub(crate) fn devices(
        &self,
        request: Option<&str>,
    ) -> impl Iterator<Item = (&str, &PreparedDevice)> {
        let wanted = move |device: &&PreparedDevice| {
            request.is_none_or(|request| {
                let parent = request.split('/').next().unwrap_or(request);
                device.requests.is_empty() || device.requests.iter().any(|name| name == parent)
            })
        };
        self.drivers.iter().flat_map(move |(driver, devices)| {
            devices.iter().filter(wanted).map(move |device| (driver.as_str(), device))
        })
    }
}

impl From<dra_v1::Device> for PreparedDevice {
    fn from(device: dra_v1::Device) -> Self {
        Self {
            pool: device.pool_name,
            device: device.device_name,
            requests: device.request_names,
            cdi_ids: device.cdi_device_ids,
        }
    }
}

/// The checkpoint file.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    path: PathBuf,
}

impl CheckpointFile {
    pub(crate) fn new(kubelet_root: &Path) -> Self {
        Self { path: kubelet_root.join("dra_manager_state") }
    }

    /// Reads the claims. A missing file means no claims.
    pub(crate) fn load(&self) -> io::Result<BTreeMap<ClaimKey, ClaimInfo>> {
        let text = match std::fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(error),
        };
        let claims: Vec<ClaimInfo> = serde_json::from_slice(&text)?;
        Ok(claims.into_iter().map(|claim| (claim.key(), claim)).collect())
    }

    pub(crate) fn save(&self, claims: &BTreeMap<ClaimKey, ClaimInfo>) -> io::Result<()> {
        let text = serde_json::to_vec(&claims.values().collect::<Vec<_>>())?;
        atomic_file::write(&self.path, &text, 0o644)
    }
}

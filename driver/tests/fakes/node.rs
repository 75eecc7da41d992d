//! A fake node: directories, GPUs and API server, on which a driver is started and stopped.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tessera_api::slice::{CoresRatio, DeviceOrder};
use tessera_driver::{
    base_spec::DriverRoot,
    driver::{Driver, DriverDependencies, DriverSettings},
    intercept::InterceptMode,
    mode::{DriverMode, FenceKind},
    other_allocators::OtherAllocatorPolicy,
    state::{
        StatePaths,
        mounts::{Mounts, Tmpfs},
    },
};
use tessera_proto::dra_v1;

use super::{
    api::Api,
    gpus::{FakeGpus, uuid},
    mounts::RecordedMounts,
};

/// A fake node.
pub struct Node {
    pub directory: tempfile::TempDir,
    pub api: Api,
    pub gpus: FakeGpus,
    pub mounts: RecordedMounts,
}

/// A share: number of the GPU, memory in GiB, compute in percent.
pub type Share = (u32, u64, u8);

impl Node {
    /// Returns a node with this number of GPUs of 16 GiB.
    pub fn with_gpus(count: u32) -> Self {
        Self::with_library(FakeGpus::with_gpus(count))
    }

    pub fn with_library(gpus: FakeGpus) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("intercept.so"), "the library").expect("written");
        let libraries = directory.path().join("root/usr/lib64");
        std::fs::create_dir_all(&libraries).expect("made");
        std::fs::write(libraries.join("libcuda.so.1"), "the driver's").expect("written");
        Self { directory, api: Api::new(), gpus, mounts: RecordedMounts::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn paths(&self) -> StatePaths {
        StatePaths::new(self.path("state"))
    }

    pub fn settings(&self) -> DriverSettings {
        DriverSettings {
            node: "node-a".parse().expect("a node's name"),
            kubelet_root: self.path("kubelet"),
            pod_uid: None,
            cdi_dir: self.path("cdi"),
            state_dir: self.path("state"),
            driver_root: DriverRoot::new(self.path("root"), "/"),
            intercept_library: self.path("intercept.so"),
            intercept: InterceptMode::Preload,
            context_memory: Default::default(),
            default_compute: tessera_api::config::ComputePolicy::Balance,
            memory_ratio: Default::default(),
            cores_ratio: CoresRatio::WHOLE,
            max_shares: Default::default(),
            correct_gpu_time: true,
            mps: false,
            device_order: DeviceOrder::Index,
            mode: DriverMode::Managed,
            fence: FenceKind::Taint,
            stock_drain: Duration::from_secs(600),
            on_other_allocator: OtherAllocatorPolicy::Refuse,
            other_resources: BTreeSet::new(),
            proc: self.path("proc"),
        }
    }

    /// Starts a driver and waits until it has published its GPUs.
    pub async fn start(&self) -> Driver {
        let driver = self.start_as(self.settings()).await;
        self.api.wait_for("a ResourceSlice", |api| (!api.slices().is_empty()).then_some(())).await;
        driver
    }

    /// Starts a driver with these settings.
    pub async fn start_as(&self, settings: DriverSettings) -> Driver {
        self.start_with(settings, Arc::new(self.mounts.clone())).await.expect("it starts")
    }

    pub async fn start_with(
        &self,
        settings: DriverSettings,
        mounts: Arc<dyn Mounts>,
    ) -> anyhow::Result<Driver> {
        let edges = DriverDependencies {
            client: self.api.client(),
            gpus: Arc::new(self.gpus.clone()),
            mig: Arc::new(self.gpus.clone()),
            mounts,
        };
        Driver::start(settings, edges).await
    }

    /// Allocates a claim with these shares on this node, and returns the kubelet's reference to it.
    pub fn allocate(&self, name: &str, shares: &[Share]) -> dra_v1::Claim {
        self.api.put_claim(claim(name, shares));
        asked(name)
    }

    /// Returns the mounts of claims, without the tmpfs of all grants, which stays.
    pub fn claim_mounts(&self) -> BTreeMap<PathBuf, Tmpfs> {
        let mut mounts = self.mounts.all();
        mounts.remove(&self.paths().grants());
        mounts
    }

    /// Returns the files, mounts and journal entries of claims. Empty if no claim is prepared.
    pub fn traces(&self) -> BTreeSet<String> {
        let mut traces = BTreeSet::new();
        for below in ["state/grants", "state/ledgers", "cdi"] {
            files(&self.path(below), &mut traces);
        }
        traces.extend(
            self.claim_mounts().into_keys().map(|path| format!("mount {}", path.display())),
        );
        let journal = std::fs::read_to_string(self.paths().journal()).unwrap_or_default();
        let journal: Value = serde_json::from_str(&journal).unwrap_or_default();
        traces.extend(
            journal["claims"].as_object().into_iter().flat_map(|claims| claims.keys().cloned()),
        );
        // The base spec stays, and each instance writes it at any time, with a temporary name
        // first.
        traces.retain(|trace| !trace.contains("k8s.gpu.tessera.dev-driver"));
        traces
    }

    /// Returns the GPUs with a requested MPS control daemon.
    pub fn requested_daemons(&self) -> BTreeSet<String> {
        let wanted = tessera_mps_protocol::MpsPaths::new(self.paths().root()).wanted();
        let entries = std::fs::read_dir(wanted).into_iter().flatten();
        entries
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect()
    }

    /// Returns the claims with a Prepare since their last Unprepare.
    pub fn asked(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.paths().asked()).into_iter().flatten();
        entries
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect()
    }
}

fn files(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        found.insert(path.display().to_string());
        files(&path, found);
    }
}

/// Returns the UID of the claim with this name.
pub fn uid(name: &str) -> String {
    format!("uid-of-{name}")
}

/// Returns the share ID of a claim's share.
pub fn share_id(name: &str, index: usize) -> String {
    let sum: u64 = name.bytes().fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("{:08x}-0000-4000-8000-{index:012}", sum as u32)
}

/// Returns the kubelet's reference to a claim.
pub fn asked(name: &str) -> dra_v1::Claim {
    dra_v1::Claim { namespace: "ns".into(), name: name.into(), uid: uid(name) }
}

/// Returns a [`claim`] with these fields of a GpuConfig.
pub fn configured(name: &str, shares: &[Share], fields: &Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
    parameters
        .as_object_mut()
        .expect("an object")
        .extend(fields.as_object().expect("fields").clone());
    let mut claim = claim(name, shares);
    claim["status"]["allocation"]["devices"]["config"] = json!([{"source": "FromClaim", "opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}}]);
    claim
}

/// Returns a claim that is allocated on the node and reserved by a pod of its name.
pub fn claim(name: &str, shares: &[Share]) -> Value {
    let result = |(index, (gpu, gib, cores)): (usize, &Share)| {
        json!({
            "request": format!("gpu-{index}"), "driver": "gpu.tessera.dev", "pool": "node-a",
            "device": uuid(*gpu).device_name(), "shareID": share_id(name, index),
            "consumedCapacity": {"memory": format!("{gib}Gi"), "cores": cores.to_string()},
        })
    };
    let results: Vec<_> = shares.iter().enumerate().map(result).collect();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns", "uid": uid(name)},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": format!("pod-{name}"), "uid": format!("uid-of-pod-{name}")}],
        },
    })
}

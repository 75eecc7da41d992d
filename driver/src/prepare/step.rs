//! The steps of a Prepare and the steps that undo them.

use std::{collections::BTreeSet, path::Path};

use tessera_api::names::{CDI_CLAIM_KIND, ClaimDeviceName, ClaimUid, GpuUuid};
use tessera_cdi::{CdiDevice, CdiKind, ContainerEdits, DeviceNode, Mount, Spec};
use tessera_intercept_abi::{
    GRANT_FILE, Grant, GrantError, HOST_DIR, LEDGER_FILE, SHARES_DIR, Text, UuidError, mps,
};
use tessera_mps_protocol::MpsPaths;

use crate::{
    base_spec::NO_LEGACY_DEVICES,
    context_memory, intercept,
    kubelet::plugin::PreparedDevice,
    state::{
        StatePaths,
        journal::{
            ClaimRecord, ComputeCap, ComputeInstanceRecord, ComputePriority, MigDeviceRecord,
            ShareRecord,
        },
        library,
    },
};

/// One change to the node. Taking a step again changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Requests MPS control daemons for exactly these GPUs: those of all claims in the journal.
    RequestMpsDaemons {
        /// The GPUs that claims share by MPS.
        gpus: BTreeSet<GpuUuid>,
    },
    /// Checks that the MPS control daemon of a GPU is ready. Changes nothing, so there is nothing
    /// to undo. A claim that fails here stays `Started` in the journal and is tried again.
    AwaitMpsDaemon {
        /// The GPU that the claim shares by MPS.
        gpu: GpuUuid,
    },
    /// Writes the base spec into the CDI directory. Not undone: it serves all claims.
    EnsureBaseSpec,
    /// Writes the grant of a share.
    WriteGrant {
        /// The share.
        share: ClaimDeviceName,
        /// Its grant.
        grant: Box<Grant>,
    },
    /// Creates the ledger of a share, on a tmpfs of its own.
    MakeLedger {
        /// The share.
        share: ClaimDeviceName,
    },
    /// Writes the claim's CDI spec. Last, since a runtime may read it at once.
    WriteClaimSpec {
        /// The claim.
        claim: ClaimUid,
        /// Its spec.
        spec: Box<Spec>,
    },
}

/// The inverse of a step. Undoing a step that was never taken changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UndoStep {
    /// The inverse of [`Step::WriteGrant`].
    RemoveGrant(ClaimDeviceName),
    /// The inverse of [`Step::MakeLedger`].
    RemoveLedger(ClaimDeviceName),
    /// The inverse of [`Step::WriteClaimSpec`].
    RemoveClaimSpec(ClaimUid),
    /// Destroys the instances of a MIG device, which were created as the journal says.
    DestroyMigDevice(Box<MigDeviceRecord>),
    /// The inverse of [`Step::RequestMpsDaemons`]: requests them only for these GPUs. Skipped if a
    /// step before it failed, since the claim then stays in the journal.
    ReleaseMpsDaemon {
        /// The GPUs that claims still share by MPS.
        remaining: BTreeSet<GpuUuid>,
    },
}

/// Errors of encoding a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantTextError {
    /// The UUID of the GPU does not fit a grant.
    #[error("cannot write UUID of GPU {0} to a grant")]
    Gpu(GpuUuid, #[source] UuidError),
    /// The claim's UID or the share's name does not fit a grant.
    #[error("`{0}` is too long for a grant")]
    Text(String, #[source] tessera_intercept_abi::TextError),
    /// The limits of the share are invalid.
    #[error("invalid limits of share {0}")]
    Numbers(ClaimDeviceName, #[source] GrantError),
}

/// Returns the steps that prepare `record`, which is claim `claim`.
///
/// `mps_gpus` are the GPUs that claims of the journal share by MPS, this one included. The same
/// record gives the same steps, so that the journal is all that repair needs.
///
/// # Errors
/// [`GrantTextError`], for records that were not planned by this driver.
pub fn steps(
    claim: &ClaimUid,
    record: &ClaimRecord,
    mps_gpus: BTreeSet<GpuUuid>,
    paths: &StatePaths,
) -> Result<Vec<Step>, GrantTextError> {
    let mut steps = vec![Step::RequestMpsDaemons { gpus: mps_gpus }];
    // Before anything else exists: a process that starts before the daemon would run without MPS.
    steps.extend(record.mps_gpu().map(|gpu| Step::AwaitMpsDaemon { gpu: gpu.clone() }));
    steps.extend(file_steps(claim, record, paths)?);
    Ok(steps)
}

/// Returns the steps that make the files of a claim, and restore those of a prepared one: the last
/// of [`steps`]. Its MPS control daemon must not keep the files from being restored.
///
/// # Errors
/// As [`steps`].
pub fn file_steps(
    claim: &ClaimUid,
    record: &ClaimRecord,
    paths: &StatePaths,
) -> Result<Vec<Step>, GrantTextError> {
    let mut steps = vec![Step::EnsureBaseSpec];
    for share in &record.shares {
        let id = share.id(claim);
        let grant = Box::new(grant(claim, share, record.context_bytes)?);
        steps.push(Step::WriteGrant { share: id.clone(), grant });
        steps.push(Step::MakeLedger { share: id });
    }
    let spec = Box::new(claim_spec(claim, record, paths));
    steps.push(Step::WriteClaimSpec { claim: claim.clone(), spec });
    Ok(steps)
}

/// Returns the steps that undo those of `record`, last first. `remaining` are the GPUs that claims
/// share by MPS without this one.
#[must_use]
pub fn undo_steps(
    claim: &ClaimUid,
    record: &ClaimRecord,
    remaining: BTreeSet<GpuUuid>,
) -> Vec<UndoStep> {
    let mut undo = vec![UndoStep::RemoveClaimSpec(claim.clone())];
    for share in record.shares.iter().rev() {
        let id = share.id(claim);
        undo.extend([UndoStep::RemoveLedger(id.clone()), UndoStep::RemoveGrant(id)]);
    }
    for device in record.mig_devices.iter().rev() {
        undo.push(UndoStep::DestroyMigDevice(Box::new(device.clone())));
    }
    undo.push(UndoStep::ReleaseMpsDaemon { remaining });
    undo
}

/// Returns the devices of a prepared claim for the kubelet. The base device comes first: the later
/// of two mounts at the same path wins, and that must be the interceptor's.
#[must_use]
pub fn answer(claim: &ClaimUid, record: &ClaimRecord) -> Vec<PreparedDevice> {
    let device = |share: &ShareRecord| PreparedDevice {
        requests: vec![share.request.parent().to_owned()],
        pool: share.pool.to_string(),
        device: share.device.to_string(),
        cdi_devices: vec![share.gpu.cdi_id(), share.id(claim).cdi_id()],
        share_id: share.share_id.as_ref().map(ToString::to_string),
    };
    let mig_device = |device: &MigDeviceRecord| PreparedDevice {
        requests: vec![device.request.parent().to_owned()],
        pool: device.pool.to_string(),
        device: device.device.to_string(),
        cdi_devices: vec![device.device.gpu().cdi_id(), device.id(claim).cdi_id()],
        share_id: None,
    };
    record.shares.iter().map(device).chain(record.mig_devices.iter().map(mig_device)).collect()
}

/// Returns the CDI kind of claim specs.
#[must_use]
pub fn claim_kind() -> CdiKind {
    CDI_CLAIM_KIND.parse().expect("invariant: the kind is a constant")
}

/// Returns the grant of a share.
///
/// # Errors
/// As [`steps`].
pub(super) fn grant(
    claim: &ClaimUid,
    share: &ShareRecord,
    context_bytes: u64,
) -> Result<Grant, GrantTextError> {
    let id = share.id(claim);
    let text = id.to_string();
    let grant = Grant {
        gpu_uuid: share
            .gpu
            .as_str()
            .parse()
            .map_err(|error| GrantTextError::Gpu(share.gpu.clone(), error))?,
        memory_limit_bytes: share.memory_bytes,
        context_bytes,
        cores_percent: u32::from(share.cores_percent),
        policy: share.compute.into(),
        oversubscribe: share.oversubscribe,
        mps: share.mps,
        claim_uid: Text::new(claim.as_str())
            .map_err(|error| GrantTextError::Text(claim.to_string(), error))?,
        id: Text::new(&text).map_err(|error| GrantTextError::Text(text.clone(), error))?,
        sequence: 0,
    };
    grant.encode().map_err(|error| GrantTextError::Numbers(id, error))?;
    Ok(grant)
}

/// Returns the CDI spec of a claim.
///
/// The interceptor is mounted by this spec and not by the base spec: all containers of the claim
/// get the version that the claim was prepared with. Containers with several claims get the mount
/// several times, and the last one wins. Containers with nothing but MIG devices do not get it.
fn claim_spec(claim: &ClaimUid, record: &ClaimRecord, paths: &StatePaths) -> Spec {
    let interceptor =
        if record.shares.is_empty() { Vec::new() } else { interceptor_mounts(record, paths) };
    let is_mixed = !record.mig_devices.is_empty();
    let (each, once) = if is_mixed { (interceptor, Vec::new()) } else { (Vec::new(), interceptor) };
    let of_share = |share| claim_device(claim, record, share, each.clone(), paths);
    let of_mig_device = |device| mig_claim_device(claim, device);
    let devices = record.shares.iter().map(of_share);
    let devices = devices.chain(record.mig_devices.iter().map(of_mig_device)).collect();
    let container_edits = ContainerEdits { mounts: once, ..ContainerEdits::default() };
    Spec::new(claim_kind(), devices, container_edits)
}

/// Returns the mounts of the interceptor.
fn interceptor_mounts(record: &ClaimRecord, paths: &StatePaths) -> Vec<Mount> {
    let installed = |file: &str| library::path(paths, &record.library, file);
    let mut mounts = Vec::new();
    if record.intercept.preloaded {
        let library = installed(library::FILE_NAME);
        mounts.push(Mount::bind_read_only(&library, Path::new(library::CONTAINER_PATH)));
        mounts.push(Mount::bind_read_only(
            &paths.preload(),
            Path::new(library::CONTAINER_PRELOAD_PATH),
        ));
    }
    // The directory, not the socket in it: another instance of the driver replaces the socket.
    mounts.push(Mount::bind_read_only(&paths.host(), Path::new(HOST_DIR)));
    // These hide the base spec's mounts at the same paths, which come first.
    mounts.extend(record.intercept.replaced_libraries.iter().filter_map(|path| {
        Some(Mount::bind_read_only(&installed(intercept::ProxiedLibrary::of(path)?.proxy()), path))
    }));
    mounts
}

fn claim_device(
    claim: &ClaimUid,
    record: &ClaimRecord,
    share: &ShareRecord,
    interceptor: Vec<Mount>,
    paths: &StatePaths,
) -> CdiDevice {
    let id = share.id(claim);
    let name = id.to_string();
    let inside = Path::new(SHARES_DIR).join(&name);
    let mut mounts = interceptor;
    mounts.push(Mount::bind_read_only(&paths.grant(&id), &inside.join(GRANT_FILE)));
    mounts.push(Mount::bind(&paths.ledger(&id), &inside.join(LEDGER_FILE)));
    let mut container_edits = ContainerEdits {
        env: vec![NO_LEGACY_DEVICES.to_owned()],
        mounts,
        ..ContainerEdits::default()
    };
    if share.mps {
        container_edits.env.extend(mps_variables(share, record.context_bytes));
        container_edits.mounts.extend(mps_mounts(share, paths));
    }
    named_device(&id, container_edits)
}

/// Returns the CDI device of a MIG device: the capability devices of its instances. The node of the
/// GPU comes from the base spec.
fn mig_claim_device(claim: &ClaimUid, device: &MigDeviceRecord) -> CdiDevice {
    let node = |compute: &ComputeInstanceRecord, minor: u32| {
        let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
        let numbers = (compute.capability_major.into(), minor.into());
        DeviceNode::character(Path::new(&path), numbers, CAPABILITY_MODE)
    };
    let nodes = device.compute_instance.iter().flat_map(|compute| {
        compute.capability_minors.iter().map(move |minor| node(compute, *minor))
    });
    let container_edits = ContainerEdits {
        env: vec![NO_LEGACY_DEVICES.to_owned()],
        device_nodes: nodes.collect(),
        ..ContainerEdits::default()
    };
    named_device(&device.id(claim), container_edits)
}

/// Mode of capability devices, as the kernel driver names it in procfs: readable by all users.
const CAPABILITY_MODE: u32 = 0o444;

fn named_device(id: &ClaimDeviceName, container_edits: ContainerEdits) -> CdiDevice {
    let name = id.to_string();
    let name = name.parse().expect("invariant: UIDs, share ids and numbers make a CDI device name");
    CdiDevice { name, annotations: Default::default(), container_edits }
}

/// Returns the variables that make processes clients of MPS and limit them
/// (docs.nvidia.com/deploy/mps, "Environment Variables").
///
/// The daemon sees one GPU, which has index 0 for its clients. A share without a cap gets no
/// percentage, so that the default of MPS applies.
fn mps_variables(share: &ShareRecord, context_bytes: u64) -> Vec<String> {
    // MPS limits each process, its context included. The grant limits all processes together, with
    // or without contexts.
    let uncharged_bytes = if context_bytes == 0 { context_memory::MAX_UNCHARGED_BYTES } else { 0 };
    let memory_mib = share.memory_bytes.saturating_add(uncharged_bytes) >> 20;
    let mut variables = vec![
        format!("{}={}", mps::PIPE_DIRECTORY, mps::DIR),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory_mib}M"),
    ];
    if share.compute == ComputeCap::Fixed && share.cores_percent > 0 {
        variables.push(format!("{}={}", mps::ACTIVE_THREAD_PERCENTAGE, share.cores_percent));
    }
    if share.priority == ComputePriority::Low {
        // 1 is below normal. MPS has no priority above normal.
        variables.push("CUDA_MPS_CLIENT_PRIORITY=1".to_owned());
    }
    variables
}

/// Returns the mounts of the daemon's pipes and of the memory that client and server share, which
/// both open in `/dev/shm`.
fn mps_mounts(share: &ShareRecord, paths: &StatePaths) -> [Mount; 2] {
    let daemon = MpsPaths::new(paths.root());
    [
        Mount::bind(&daemon.pipe(&share.gpu), Path::new(mps::DIR)),
        Mount::bind(&daemon.shm(&share.gpu), Path::new("/dev/shm")),
    ]
}

//! What preparing a claim does to the node, step by step, and what takes it back.

use std::path::Path;

use tessera_api::names::{CDI_CLAIM_KIND, ClaimDeviceName, ClaimUid, GpuUuid};
use tessera_cdi::{ContainerEdits, Device, Kind, Mount, Spec};
use tessera_intercept_abi::{
    ComputePolicy, GRANT_FILE, Grant, GrantError, HOST_DIR, LEDGER_FILE, SHARES_DIR, Text,
    UuidError, mps,
};
use tessera_mps_protocol::MpsPaths;

use crate::{
    base_spec::NO_LEGACY_DEVICES,
    context_memory, intercept,
    kubelet::plugin::PreparedDevice,
    state::{
        StatePaths,
        journal::{ClaimRecord, ComputeCap, ComputePriority, ShareRecord},
        library,
    },
};

/// One change to the node. Taking a step that was taken already changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The base spec is in the CDI directory. Not taken back: it serves all claims.
    EnsureBaseSpec,
    /// The share's grant is written.
    WriteGrant {
        /// The share.
        share: ClaimDeviceName,
        /// What it says.
        grant: Box<Grant>,
    },
    /// The share's ledger is there, on a tmpfs of its own.
    MakeLedger {
        /// The share.
        share: ClaimDeviceName,
    },
    /// The claim's CDI spec is in the CDI directory. Last, since a runtime may read it at once.
    WriteClaimSpec {
        /// The claim.
        claim: ClaimUid,
        /// Its spec.
        spec: Box<Spec>,
    },
}

/// The inverse of a step. Undoing what was never done changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    /// Of [`Step::WriteGrant`].
    RemoveGrant(ClaimDeviceName),
    /// Of [`Step::MakeLedger`].
    RemoveLedger(ClaimDeviceName),
    /// Of [`Step::WriteClaimSpec`].
    RemoveClaimSpec(ClaimUid),
}

/// Why a share cannot be written into a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantTextError {
    /// The GPU's UUID.
    #[error("GPU `{0}` cannot be named in a grant")]
    Gpu(GpuUuid, #[source] UuidError),
    /// The claim's UID or the share's name.
    #[error("`{0}` is too long for a grant")]
    Text(String, #[source] tessera_intercept_abi::TextError),
    /// The numbers.
    #[error("share `{0}` cannot be granted")]
    Numbers(ClaimDeviceName, #[source] GrantError),
}

/// The steps that bring about what `record` says. The same record gives the same steps, so that the
/// journal is all that repair needs.
///
/// # Errors
/// [`GrantTextError`], for records that were not planned here.
pub fn steps(
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

/// The steps that take back what `record` says, last first.
#[must_use]
pub fn undo_steps(claim: &ClaimUid, record: &ClaimRecord) -> Vec<Undo> {
    let mut undo = vec![Undo::RemoveClaimSpec(claim.clone())];
    for share in record.shares.iter().rev() {
        let id = share.id(claim);
        undo.extend([Undo::RemoveLedger(id.clone()), Undo::RemoveGrant(id)]);
    }
    undo
}

/// What the kubelet is told of a prepared claim. The base device's files come first: a later mount
/// at the same path wins, and ours must.
#[must_use]
pub fn answer(claim: &ClaimUid, record: &ClaimRecord) -> Vec<PreparedDevice> {
    let device = |share: &ShareRecord| PreparedDevice {
        requests: vec![share.request.parent().to_owned()],
        pool: share.pool.to_string(),
        device: share.device.to_string(),
        cdi_devices: vec![share.gpu.cdi_id(), share.id(claim).cdi_id()],
        share_id: share.share_id.as_ref().map(ToString::to_string),
    };
    record.shares.iter().map(device).collect()
}

/// The CDI kind of claims.
#[must_use]
pub fn claim_kind() -> Kind {
    CDI_CLAIM_KIND.parse().expect("invariant: the kind is a constant")
}

fn grant(
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
        policy: match share.compute {
            ComputeCap::None => ComputePolicy::None,
            ComputeCap::Fixed => ComputePolicy::Fixed,
            ComputeCap::Balance => ComputePolicy::Balance,
        },
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

/// The library is mounted by the claim's spec and not by the base spec: it stays the one that the
/// claim was prepared with, for all of its containers. Containers with several claims get the mount
/// several times, where the last one wins.
fn claim_spec(claim: &ClaimUid, record: &ClaimRecord, paths: &StatePaths) -> Spec {
    let devices =
        record.shares.iter().map(|share| claim_device(claim, record, share, paths)).collect();
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
    // The directory and not the socket in it, which another instance of the driver replaces.
    mounts.push(Mount::bind_read_only(&paths.host(), Path::new(HOST_DIR)));
    // The base spec's mounts at these paths come first, and lose.
    mounts.extend(record.intercept.in_place_of.iter().filter_map(|path| {
        Some(Mount::bind_read_only(&installed(intercept::Library::of(path)?.proxy()), path))
    }));
    let container_edits = ContainerEdits { mounts, ..ContainerEdits::default() };
    Spec::new(claim_kind(), devices, container_edits)
}

fn claim_device(
    claim: &ClaimUid,
    record: &ClaimRecord,
    share: &ShareRecord,
    paths: &StatePaths,
) -> Device {
    let id = share.id(claim);
    let name = id.to_string();
    let inside = Path::new(SHARES_DIR).join(&name);
    let mut container_edits = ContainerEdits {
        env: vec![NO_LEGACY_DEVICES.to_owned()],
        mounts: vec![
            Mount::bind_read_only(&paths.grant(&id), &inside.join(GRANT_FILE)),
            Mount::bind(&paths.ledger(&id), &inside.join(LEDGER_FILE)),
        ],
        ..ContainerEdits::default()
    };
    if share.mps {
        container_edits.env.extend(mps_variables(share, record.context_bytes));
        container_edits.mounts.extend(mps_mounts(share, paths));
    }
    let name = name.parse().expect("invariant: UIDs, share ids and numbers make a CDI device name");
    Device { name, annotations: Default::default(), container_edits }
}

/// What makes processes clients of MPS, and holds them there (docs.nvidia.com/deploy/mps,
/// "Environment Variables"). The daemon sees one GPU, which is number 0 to its clients whatever it
/// is on the node. Nothing is said of who has no cap, so that MPS's own default holds.
fn mps_variables(share: &ShareRecord, context_bytes: u64) -> Vec<String> {
    // Of each process, with its context; what all of them take together the grant says, where
    // contexts are charged or not.
    let uncharged_bytes = if context_bytes == 0 { context_memory::MOST_UNCHARGED } else { 0 };
    let memory_mib = share.memory_bytes.saturating_add(uncharged_bytes) >> 20;
    let mut variables = vec![
        format!("{}={}", mps::PIPE_DIRECTORY, mps::DIR),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory_mib}M"),
    ];
    if share.compute == ComputeCap::Fixed && share.cores_percent > 0 {
        variables.push(format!("{}={}", mps::ACTIVE_THREAD_PERCENTAGE, share.cores_percent));
    }
    if share.priority == ComputePriority::Low {
        // Below normal; there is nothing above.
        variables.push("CUDA_MPS_CLIENT_PRIORITY=1".to_owned());
    }
    variables
}

/// The daemon's pipes, and the memory that client and server share, which both look for in
/// `/dev/shm`.
fn mps_mounts(share: &ShareRecord, paths: &StatePaths) -> [Mount; 2] {
    let daemon = MpsPaths::new(paths.root());
    [
        Mount::bind(&daemon.pipe(&share.gpu), Path::new(mps::DIR)),
        Mount::bind(&daemon.shm(&share.gpu), Path::new("/dev/shm")),
    ]
}

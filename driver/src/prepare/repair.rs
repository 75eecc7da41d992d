//! Repairs the node at start: makes it match the journal.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::names::{ClaimName, ClaimUid, Namespace, PoolName};
use tessera_runtime::error_chain::chain;

use super::{
    LocalNode, PrepareError, claim::PreparableClaim, execute::StepError, plan, source::ClaimSource,
    step::claim_kind,
};
use crate::state::{
    attempts,
    journal::{ClaimRecord, Journal, JournalError, RecordState, Replaced},
};

/// Findings and actions of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairResult {
    /// Claims that a dead process had started: rolled back.
    pub rolled_back: Vec<ClaimUid>,
    /// Claims that another instance is preparing: left unchanged.
    pub waiting: Vec<ClaimUid>,
    /// Prepared claims, whose files were restored.
    pub kept: Vec<ClaimUid>,
    /// Removed grants, ledgers and CDI specs of claims that are not prepared.
    pub removed: BTreeSet<String>,
}

impl LocalNode {
    /// Rolls back started claims, restores files of prepared claims, and removes files of all
    /// others.
    ///
    /// Containers restart with their CDI ids and without another Prepare: missing files must be
    /// restored before the kubelet calls again.
    ///
    /// # Idempotency
    /// Doing it again changes nothing.
    ///
    /// # Errors
    /// [`PrepareError`], for the journal and for directories that cannot be listed. A prepared
    /// claim that cannot be restored is logged and tried again at its next Prepare; a file that
    /// cannot be removed, at the next start.
    pub fn repair(&self) -> Result<RepairResult, PrepareError> {
        let mut journal = self.journal.lock()?;
        let specs = self.executor.specs().ids(&claim_kind()).map_err(StepError::from)?;
        if journal.is_new() && !specs.is_empty() {
            return Err(JournalError::Lost { path: self.paths.journal() }.into());
        }
        self.executor.files().mount_grants().map_err(StepError::from)?;
        let mut repaired = RepairResult::default();
        attempts::sweep(&self.paths, &journal)?;
        let claims: Vec<(ClaimUid, ClaimRecord)> =
            journal.journal().claims.clone().into_iter().collect();
        for (claim, record) in claims {
            let (namespace, name) = (&record.namespace, &record.name);
            match record.state {
                // The other instance of an update waits for the claim's MPS control daemon.
                RecordState::Started if attempts::is_under_way(&self.paths, &claim) => {
                    repaired.waiting.push(claim);
                }
                RecordState::Started => match self.roll_back(&claim, &mut journal) {
                    Ok(()) => repaired.rolled_back.push(claim),
                    Err(error) => tracing::error!(
                        %namespace, claim = %name, uid = %claim, error = %chain(&error),
                        "cannot roll back interrupted Prepare; the claim stays in the journal as Started"
                    ),
                },
                RecordState::Completed => {
                    if let Err(error) = self.restore(&claim, record.clone(), &mut journal) {
                        tracing::error!(
                            %namespace, claim = %name, uid = %claim, error = %chain(&error),
                            "cannot restore files of prepared claim; its containers may fail to restart"
                        );
                    }
                    repaired.kept.push(claim);
                }
            }
        }
        let gpus = journal.journal().mps_gpus(None);
        self.executor.mps().request(&gpus)?;
        repaired.removed = self.remove_unused(journal.journal())?;
        Ok(repaired)
    }

    /// Removes files that belong to no claim of the journal. Files of unknown names stay.
    fn remove_unused(&self, journal: &Journal) -> Result<BTreeSet<String>, PrepareError> {
        let claims = &journal.claims;
        let shares = claims
            .iter()
            .flat_map(|(claim, record)| record.shares.iter().map(|share| share.id(claim)))
            .collect();
        let files = self.executor.files().retain(&shares).map_err(StepError::from)?;
        for error in &files.failed {
            tracing::error!(error = %chain(error), "cannot remove files of a claim that is not prepared");
        }
        let specs: BTreeSet<String> = claims.keys().map(ToString::to_string).collect();
        let specs = self.executor.specs().retain(&claim_kind(), &specs).map_err(StepError::from)?;
        for path in files.foreign.iter().chain(&specs.unmanaged) {
            tracing::warn!(path = %path.display(), "ignoring unknown file in state directory");
        }
        let libraries = claims.values().map(|record| record.library.clone()).collect();
        if let Err(error) = self.library.remove_others(&self.paths, &libraries) {
            tracing::warn!(error = %chain(&error), "cannot remove unused interceptor libraries");
        }
        Ok(files.removed.into_iter().chain(specs.removed).collect())
    }

    /// Rebuilds an unreadable or lost journal from the claims that are allocated to this node's
    /// `pool` and have files here.
    ///
    /// Claims that are deleted in the API are left out, and repair removes their files. If the
    /// process dies meanwhile, the journal stays unreadable and the next start rebuilds it.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn rebuild(
        &self,
        claims: &[k8s_openapi::api::resource::v1::ResourceClaim],
        pool: &PoolName,
    ) -> Result<(), PrepareError> {
        let on_disk = self.executor.files().claims().map_err(StepError::from)?;
        let specs = self.executor.specs().ids(&claim_kind()).map_err(StepError::from)?;
        let is_here = |claim: &ClaimUid| on_disk.contains(claim) || specs.contains(claim.as_str());
        let mut records = BTreeMap::new();
        for claim in claims {
            let Some(checked) = checked(claim, pool).filter(|checked| is_here(&checked.uid)) else {
                continue;
            };
            let Ok(mut record) = plan::record(&checked, &self.installed()) else { continue };
            record.state = RecordState::Completed;
            self.adopt_mig_devices(&mut record);
            // The injection and the context memory are lost with the journal: those of claims that
            // are prepared now are used, or the preload library alone.
            record.intercept = self.injection().unwrap_or_default();
            record.context_bytes = self.context_memory.bytes();
            records.insert(checked.uid, record);
        }
        let claims = records.len();
        match self.journal.replace_unreadable(Journal { claims: records })? {
            Replaced::Now { aside } => tracing::warn!(?aside, claims, "journal is rebuilt"),
            Replaced::ByAnother => {
                tracing::warn!("another instance of the driver has rebuilt the journal")
            }
        }
        Ok(())
    }
}

fn checked(
    claim: &k8s_openapi::api::resource::v1::ResourceClaim,
    pool: &PoolName,
) -> Option<PreparableClaim> {
    let metadata = &claim.metadata;
    let uid = ClaimUid::new(metadata.uid.as_deref()?).ok()?;
    let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
    let name = ClaimName::new(metadata.name.as_deref()?).ok()?;
    PreparableClaim::check(claim, &uid, &namespace, &name, pool).ok()
}

/// Repairs the node.
///
/// An unreadable journal is set aside. It is rebuilt, as a lost one is, from the claims of the API
/// server. This waits for the API server: prepared claims must be known before others are prepared.
///
/// # Errors
/// [`PrepareError`]. After [`JournalError::Newer`] this driver must not continue.
pub async fn repair(
    node: &Arc<LocalNode>,
    source: &ClaimSource,
    pool: &PoolName,
) -> Result<RepairResult, PrepareError> {
    /// Pause between attempts to reach the API server or to lock the journal.
    const PAUSE: Duration = Duration::from_secs(2);

    loop {
        let worker = Arc::clone(node);
        match tokio::task::spawn_blocking(move || worker.repair()).await? {
            // The other instance of an update holds the lock.
            Err(PrepareError::Journal(error @ JournalError::Busy { .. })) => {
                tracing::warn!(error = %chain(&error), "waiting for the journal's lock");
                tokio::time::sleep(PAUSE).await;
            }
            Err(PrepareError::Journal(
                error @ (JournalError::Unreadable { .. } | JournalError::Lost { .. }),
            )) => {
                tracing::error!(error = %chain(&error), "rebuilding the journal from the claims of the API server");
                break;
            }
            result => return result,
        }
    }
    let claims = loop {
        match source.list(|claim| checked(claim, pool).is_some()).await {
            Ok(claims) => break claims,
            Err(error) => {
                tracing::error!(error = %chain(&error), "cannot list claims to rebuild the journal; trying again");
                tokio::time::sleep(PAUSE).await;
            }
        }
    };
    let (worker, pool) = (Arc::clone(node), pool.clone());
    tokio::task::spawn_blocking(move || {
        worker.rebuild(&claims, &pool)?;
        worker.repair()
    })
    .await?
}

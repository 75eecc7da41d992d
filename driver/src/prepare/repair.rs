//! Brings the node in line with the journal at start.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::names::{ClaimName, ClaimUid, Namespace, PoolName};
use tessera_runtime::error_chain::chain;

use super::{
    Node, PrepareError,
    claim::AllocatedClaim,
    execute::StepError,
    plan,
    source::ClaimSource,
    step::{claim_kind, steps, undo_steps},
};
use crate::{
    mps::MpsError,
    state::attempts,
    state::journal::{ClaimRecord, Journal, JournalError, Replaced, State},
};

/// What repair found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Claims that a dead process had begun: taken back.
    pub rolled_back: Vec<ClaimUid>,
    /// Claims that another instance has begun and goes on with: left as they are.
    pub waiting: Vec<ClaimUid>,
    /// Claims that are prepared: their files are all there now.
    pub kept: Vec<ClaimUid>,
    /// Grants, ledgers and CDI specs of claims that are not prepared: removed.
    pub removed: BTreeSet<String>,
}

impl Node {
    /// Rolls back what was only started, makes again what is missing of what is prepared, and
    /// removes what belongs to no prepared claim.
    ///
    /// Container restarts reuse CDI ids without another Prepare: what is missing must be there
    /// before the kubelet asks again.
    ///
    /// # Idempotency
    /// Doing it again changes nothing.
    ///
    /// # Errors
    /// [`PrepareError`], for the journal and for directories that cannot be listed. A prepared
    /// claim that cannot be made whole is logged, and tried again when the kubelet asks for it;
    /// so is what cannot be removed, for the next start.
    pub fn repair(&self) -> Result<Repaired, PrepareError> {
        let mut journal = self.journal.lock()?;
        let specs = self.executor.specs().ids(&claim_kind()).map_err(StepError::from)?;
        if journal.is_new() && !specs.is_empty() {
            return Err(JournalError::Lost { path: self.paths.journal() }.into());
        }
        self.executor.files().mount_grants().map_err(StepError::from)?;
        let mut repaired = Repaired::default();
        attempts::sweep(&self.paths, &journal)?;
        let claims: Vec<(ClaimUid, ClaimRecord)> =
            journal.journal().claims.clone().into_iter().collect();
        for (claim, record) in claims {
            match record.state {
                // Of the other instance of an update, which waits for the claim's MPS control
                // daemon.
                State::Started if attempts::is_under_way(&self.paths, &claim) => {
                    repaired.waiting.push(claim)
                }
                State::Started => match self.executor.undo(&undo_steps(&claim, &record)) {
                    Ok(()) => {
                        journal.remove(&claim)?;
                        repaired.rolled_back.push(claim);
                    }
                    Err(error) => {
                        tracing::error!(uid = %claim, error = %chain(&error), "what a Prepare has begun cannot be taken back; the claim stays in the journal as started");
                    }
                },
                State::Completed => {
                    self.make_whole(&claim, &record);
                    repaired.kept.push(claim);
                }
            }
        }
        self.mps.want(journal.journal(), None).map_err(MpsError::from)?;
        repaired.removed = self.remove_others(journal.journal())?;
        Ok(repaired)
    }

    /// Removes what belongs to no claim of the journal. What is none of ours is left alone.
    fn remove_others(&self, journal: &Journal) -> Result<BTreeSet<String>, PrepareError> {
        let claims = &journal.claims;
        let shares = claims
            .iter()
            .flat_map(|(claim, record)| record.shares.iter().map(|share| share.id(claim)))
            .collect();
        let files = self.executor.files().retain(&shares).map_err(StepError::from)?;
        for error in &files.failed {
            tracing::error!(error = %chain(error), "what belongs to no prepared claim stays");
        }
        let specs: BTreeSet<String> = claims.keys().map(ToString::to_string).collect();
        let specs = self.executor.specs().retain(&claim_kind(), &specs).map_err(StepError::from)?;
        for path in files.foreign.iter().chain(&specs.foreign) {
            tracing::warn!(path = %path.display(), "this is none of ours, in a place of ours; it is left alone");
        }
        let libraries = claims.values().map(|record| record.library.clone()).collect();
        if let Err(error) = self.library.remove_others(&self.paths, &libraries) {
            tracing::warn!(error = %chain(&error), "unused interceptor libraries stay");
        }
        Ok(files.removed.into_iter().chain(specs.removed).collect())
    }

    fn make_whole(&self, claim: &ClaimUid, record: &ClaimRecord) {
        let result = steps(claim, record, &self.paths)
            .map_err(PrepareError::from)
            .and_then(|steps| Ok(self.executor.execute(&steps)?));
        if let Err(error) = result {
            tracing::error!(uid = %claim, error = %chain(&error), "a prepared claim is not whole; its containers may not restart");
        }
    }

    /// Writes an unreadable or lost journal anew, from the claims that are allocated to this node's
    /// `pool` and have files here. What the API does not know is not put back, so that repair
    /// removes its files. Dying in it leaves the journal unreadable, for the next start to rebuild.
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
            let Ok(mut record) = plan::record(&checked, &self.library.hash) else { continue };
            record.state = State::Completed;
            // How it stood and what contexts cost is lost with the journal: as in claims that are
            // prepared now, or at least in every program.
            record.intercept = self.stand().unwrap_or_default();
            record.context_bytes = self.context_memory.bytes();
            records.insert(checked.uid, record);
        }
        let claims = records.len();
        match self.journal.replace_unreadable(Journal { claims: records })? {
            Replaced::Now { aside } => tracing::warn!(?aside, claims, "the journal is rebuilt"),
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
) -> Option<AllocatedClaim> {
    let metadata = &claim.metadata;
    let uid = ClaimUid::new(metadata.uid.as_deref()?).ok()?;
    let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
    let name = ClaimName::new(metadata.name.as_deref()?).ok()?;
    AllocatedClaim::check(claim, &uid, &namespace, &name, pool).ok()
}

/// Repairs the node. An unreadable journal is set aside, and as a lost one rebuilt from the API's
/// claims, which is waited for: what is prepared must be known before anything new is.
///
/// # Errors
/// [`PrepareError`]; above all [`JournalError::Newer`], with which this driver must not go on.
pub async fn repair(
    node: &Arc<Node>,
    source: &ClaimSource,
    pool: &PoolName,
) -> Result<Repaired, PrepareError> {
    /// Between attempts to reach the API.
    const PAUSE: Duration = Duration::from_secs(2);

    let worker = Arc::clone(node);
    match tokio::task::spawn_blocking(move || worker.repair()).await? {
        Err(PrepareError::Journal(
            error @ (JournalError::Unreadable { .. } | JournalError::Lost { .. }),
        )) => {
            tracing::error!(error = %chain(&error), "the journal is rebuilt from the claims that the API has");
        }
        result => return result,
    }
    let claims = loop {
        match source.list(|claim| checked(claim, pool).is_some()).await {
            Ok(claims) => break claims,
            Err(error) => {
                tracing::error!(error = %chain(&error), "the journal cannot be rebuilt without the API; trying again");
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

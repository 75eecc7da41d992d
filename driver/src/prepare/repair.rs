//! Brings the node in line with the journal at start.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::names::{ClaimName, ClaimUid, Namespace, PoolName};

use super::{
    Node, PrepareError,
    claim::AllocatedClaim,
    execute::StepError,
    plan,
    source::ClaimSource,
    step::{claim_kind, steps, undo_steps},
};
use crate::{
    report::chain,
    state::journal::{ClaimRecord, Journal, JournalError, State},
};

/// What repair found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Claims that a dead process had begun: taken back.
    pub rolled_back: Vec<ClaimUid>,
    /// Claims that are prepared: their files are all there now.
    pub kept: Vec<ClaimUid>,
    /// Grants, ledgers and CDI specs of claims that are not prepared: removed.
    pub removed: BTreeSet<String>,
}

impl Node {
    /// Rolls back what was only started, makes again what is missing of what is prepared, and removes what belongs to no prepared claim.
    ///
    /// Container restarts reuse CDI ids without another Prepare: what is missing must be there before the kubelet asks again.
    ///
    /// # Idempotency
    /// Doing it again changes nothing.
    ///
    /// # Errors
    /// [`PrepareError`], for the journal and for what cannot be removed. A prepared claim that cannot be made whole is logged, and tried
    /// again when the kubelet asks for it.
    pub fn repair(&self) -> Result<Repaired, PrepareError> {
        let mut journal = self.journal.lock()?;
        let mut repaired = Repaired::default();
        let claims: Vec<(ClaimUid, ClaimRecord)> = journal.journal().claims.clone().into_iter().collect();
        for (claim, record) in claims {
            match record.state {
                State::Started => {
                    self.executor.undo(&undo_steps(&claim, &record))?;
                    journal.remove(&claim)?;
                    repaired.rolled_back.push(claim);
                }
                State::Completed => {
                    self.make_whole(&claim, &record);
                    repaired.kept.push(claim);
                }
            }
        }
        let prepared = &journal.journal().claims;
        let shares = prepared
            .iter()
            .flat_map(|(claim, record)| record.shares.iter().map(|share| share.id(claim)))
            .collect();
        repaired.removed = self.executor.files().retain(&shares).map_err(StepError::from)?;
        let specs: BTreeSet<String> = prepared.keys().map(ToString::to_string).collect();
        let cleaned = self.executor.specs().retain(&claim_kind(), &specs).map_err(StepError::from)?;
        for path in &cleaned.foreign {
            tracing::warn!(path = %path.display(), "a file in the CDI directory is named like ours and is not; it is left alone");
        }
        repaired.removed.extend(cleaned.removed);
        let libraries = prepared.values().map(|record| record.library.clone()).collect();
        if let Err(error) = self.library.remove_others(&self.paths, &libraries) {
            tracing::warn!(error = %chain(&error), "unused interceptor libraries stay");
        }
        Ok(repaired)
    }

    fn make_whole(&self, claim: &ClaimUid, record: &ClaimRecord) {
        let result = steps(claim, record, &self.paths)
            .map_err(PrepareError::from)
            .and_then(|steps| Ok(self.executor.execute_again(&steps)?));
        if let Err(error) = result {
            tracing::error!(uid = %claim, error = %chain(&error), "a prepared claim is not whole; its containers may not restart");
        }
    }

    /// Writes an unreadable journal anew, from the claims that are allocated to this node's `pool` and have files here. What the API does
    /// not know is not put back, so that repair removes its files. Dying in it leaves the journal unreadable, for the next start to rebuild.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn rebuild(
        &self,
        claims: &[k8s_openapi::api::resource::v1::ResourceClaim],
        pool: &PoolName,
    ) -> Result<(), PrepareError> {
        let on_disk = self.executor.files().claims().map_err(StepError::from)?;
        let mut records = BTreeMap::new();
        for claim in claims {
            let Some(checked) = checked(claim, pool).filter(|checked| on_disk.contains(&checked.uid)) else {
                continue;
            };
            let Ok(mut record) = plan::record(&checked, &self.library.hash) else { continue };
            record.state = State::Completed;
            records.insert(checked.uid, record);
        }
        let claims = records.len();
        match self.journal.replace_unreadable(Journal { claims: records })? {
            Some(aside) => tracing::warn!(aside = %aside.display(), claims, "the journal is rebuilt"),
            None => tracing::warn!("another instance of the driver has rebuilt the journal"),
        }
        Ok(())
    }
}

fn checked(claim: &k8s_openapi::api::resource::v1::ResourceClaim, pool: &PoolName) -> Option<AllocatedClaim> {
    let metadata = &claim.metadata;
    let uid = ClaimUid::new(metadata.uid.as_deref()?).ok()?;
    let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
    let name = ClaimName::new(metadata.name.as_deref()?).ok()?;
    AllocatedClaim::check(claim, &uid, &namespace, &name, pool).ok()
}

/// Repairs the node. An unreadable journal is set aside and rebuilt from the API's claims, which is waited for: what is prepared must
/// be known before anything new is.
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
        Err(PrepareError::Journal(error @ JournalError::Unreadable { .. })) => {
            tracing::error!(error = %chain(&error), "the journal is set aside and rebuilt from the claims that the API has");
        }
        result => return result,
    }
    let claims = loop {
        match source.list().await {
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

//! Preparing and unpreparing claims.
//!
//! ```text
//! kubelet call -> task of its own -> Attempt -> claim from the API -> AllocatedClaim::check
//!                                            -> [journal lock] does the attempt stand? -> plan -> Started -> steps -> Completed [unlock]
//! ```
//!
//! The kubelet cancels calls (pod deletion, 45 s deadline), sends the same claim twice at once (two
//! pods that share it), repeats calls after restarts, and during an update calls either of two
//! instances. So the work runs in a task that nobody cancels; the part that changes the node is one
//! blocking function under the journal's lock, short because no network is waited for in it; and
//! what waits for the network or for room is an attempt that an Unprepare ends, in whichever
//! instance.

pub mod claim;
pub mod execute;
pub mod plan;
pub mod repair;
pub mod source;
pub mod step;

use std::{io, sync::Arc, time::Duration};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_api::{
    Inventory,
    names::{ClaimName, ClaimUid, NameError, Namespace, PoolName},
    slice::MemoryRatio,
};
use tessera_runtime::error_chain::chain;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tracing::Instrument;

use self::{
    claim::{AllocatedClaim, ClaimError},
    execute::{Executor, StepError},
    plan::{Decision, PlanError, plan},
    source::{ClaimSource, ReadError},
    step::{GrantTextError, answer, steps, undo_steps},
};
use crate::{
    context_memory::ContextMemory,
    events::Events,
    fault,
    intercept::{Intercept, Stand},
    inventory::HardwareState,
    kubelet::plugin::{AskedClaim, Claims, PreparedDevice},
    metrics::{Metrics, Operation},
    mode::Mode,
    mps::{Mps, MpsError},
    state::{
        StatePaths,
        attempts::{self, Attempt, AttemptError},
        journal::{ClaimRecord, JournalError, JournalStore, LockedJournal, State},
        library::{InstalledLibrary, LibraryError},
    },
};

/// How long a Prepare goes on trying. The kubelet waits 45 s, and after a failure it comes back
/// only with the pod's next sync, 60 to 90 s later with production settings: what passes by itself
/// is waited for here.
const PATIENCE: Duration = Duration::from_secs(40);

/// The first pause between attempts, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why a claim was not prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The kubelet's words make no names.
    #[error("the kubelet names no claim that can exist")]
    Name(#[from] NameError),
    /// The claim could not be read.
    #[error("the claim could not be checked")]
    Read(#[from] ReadError),
    /// The claim is not for this node, or not as it must be.
    #[error("the claim cannot be prepared as it is")]
    Claim(#[from] ClaimError),
    /// Nobody knows which GPUs there are.
    #[error("the GPUs of this node are not known: {reason}")]
    NoHardware {
        /// Why not.
        reason: String,
    },
    /// It does not fit.
    #[error("the claim cannot be prepared here now")]
    Plan(#[from] PlanError),
    /// Who asked for it wants it no more.
    #[error("the kubelet has unprepared the claim meanwhile")]
    Unprepared,
    /// It cannot be told whether it is wanted.
    #[error("the attempt cannot be kept")]
    Attempt(#[from] AttemptError),
    /// The journal cannot be used.
    #[error("the journal cannot be used")]
    Journal(#[from] JournalError),
    /// A grant cannot say it.
    #[error("the claim cannot be granted")]
    Grant(#[from] GrantTextError),
    /// There is nothing that could hold its containers to it.
    #[error("the interceptor library is not installed")]
    Library(#[from] LibraryError),
    /// It shares by MPS, and cannot.
    #[error("the claim cannot share its GPU by MPS now")]
    Mps(#[from] MpsError),
    /// The interceptor is to stand in its place, and it is not there.
    #[error(
        "there is no libcuda.so.1 of the NVIDIA driver for the interceptor to stand in the place of"
    )]
    NoDriverLibrary,
    /// A change to the node failed; those before it were taken back, or are remembered to be.
    #[error("preparing the node failed")]
    Step(#[from] StepError),
    /// A defect of the driver.
    #[error("the driver failed internally: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}

impl PrepareError {
    /// Whether trying again soon may help.
    fn is_transient(&self) -> bool {
        match self {
            Self::Read(error) => error.is_transient(),
            Self::Plan(error) => error.is_transient(),
            Self::Mps(error) => error.is_transient(),
            Self::NoHardware { .. } | Self::NoDriverLibrary => true,
            _ => false,
        }
    }
}

/// Why a claim was not unprepared: all of it is worth trying again.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// The journal cannot be used.
    #[error("the journal cannot be used")]
    Journal(#[from] JournalError),
    /// The control daemon that nobody needs any more cannot be given up.
    #[error("the files by which MPS control daemons are asked for cannot be used")]
    Mps(#[from] io::Error),
    /// Attempts to prepare it cannot be ended.
    #[error("the attempts to prepare the claim cannot be ended")]
    Attempt(#[from] AttemptError),
    /// A change to the node failed.
    #[error("cleaning up the node failed")]
    Step(#[from] StepError),
    /// A defect of the driver.
    #[error("the driver failed internally: see its log")]
    Panicked(#[from] tokio::task::JoinError),
}

/// The node as the preparer changes it.
#[derive(Debug)]
pub struct Node {
    /// Where its state is.
    pub paths: StatePaths,
    /// What is prepared.
    pub journal: Arc<JournalStore>,
    /// Who changes the node.
    pub executor: Executor,
    /// What containers get.
    pub library: InstalledLibrary,
    /// Where it stands in them.
    pub intercept: Intercept,
    /// What a context is charged there.
    pub context_memory: ContextMemory,
    /// How much of the GPUs' memory is published.
    pub memory_ratio: MemoryRatio,
    /// The MPS control daemons.
    pub mps: Mps,
}

/// Prepares and unprepares the claims of one node.
#[derive(Debug)]
pub struct Preparer {
    node: Arc<Node>,
    pool: PoolName,
    hardware: watch::Receiver<Arc<HardwareState>>,
    source: ClaimSource,
    events: Events,
    metrics: Arc<Metrics>,
    mode: Mode,
}

/// A claim as the kubelet names it, checked.
#[derive(Clone, Debug)]
struct NamedClaim {
    uid: ClaimUid,
    namespace: Namespace,
    name: ClaimName,
}

impl TryFrom<&AskedClaim> for NamedClaim {
    type Error = NameError;

    fn try_from(asked: &AskedClaim) -> Result<Self, NameError> {
        Ok(Self {
            uid: ClaimUid::new(&asked.uid)?,
            namespace: Namespace::new(&asked.namespace)?,
            name: ClaimName::new(&asked.name)?,
        })
    }
}

impl Preparer {
    /// Prepares claims of `pool` on `node`.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        pool: PoolName,
        hardware: watch::Receiver<Arc<HardwareState>>,
        source: ClaimSource,
        events: Events,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { node, pool, hardware, source, events, metrics, mode: Mode::Managed }
    }

    /// Where this mode holds.
    #[must_use]
    pub fn in_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Prepares one claim, with patience for what passes by itself.
    ///
    /// # Idempotency
    /// A claim that is prepared gets the same answer, and what is missing of its files is made
    /// again.
    ///
    /// # Errors
    /// [`PrepareError`]; the node is as before.
    async fn prepare_patiently(
        &self,
        asked: &AskedClaim,
        until: Instant,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let claim = NamedClaim::try_from(asked)?;
        let (node, uid) = (Arc::clone(&self.node), claim.uid.clone());
        // Before the claim is read: whoever unprepares it from now on is seen.
        let attempt =
            tokio::task::spawn_blocking(move || Attempt::begin(&node.paths, &uid)).await??;
        let attempt = Arc::new(attempt);
        fault::point_async("prepare-asked").await;
        let mut journal = self.node.journal.watch();
        let mut hardware = self.hardware.clone();
        let mut pause = FIRST_PAUSE;
        loop {
            journal.mark_unchanged();
            hardware.mark_unchanged();
            let mut read = None;
            let error = match self.attempt(&claim, &attempt, until, &mut read).await {
                Ok(devices) => return Ok(devices),
                Err(error) => error,
            };
            let next = Instant::now() + pause;
            if !error.is_transient() || next >= until {
                if let Some(claim) = read.filter(|_| !matches!(error, PrepareError::Unprepared)) {
                    self.events.prepare_failed(&claim, &chain(&error));
                }
                return Err(error);
            }
            self.metrics.retried();
            tracing::warn!(error = %chain(&error), "the claim cannot be prepared yet; trying again");
            tokio::select! {
                () = sleep_until(next) => {}
                Ok(()) = journal.changed() => {}
                Ok(()) = hardware.changed() => {}
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt. Leaves in `read` the claim as the API has it, as soon as it is known.
    async fn attempt(
        &self,
        claim: &NamedClaim,
        attempt: &Arc<Attempt>,
        until: Instant,
        read: &mut Option<ResourceClaim>,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        if !attempt.stands()? {
            return Err(PrepareError::Unprepared);
        }
        let from_api = match self.source.read(&claim.namespace, &claim.name, until).await {
            Ok(from_api) => read.insert(from_api),
            // The kubelet itself has read the claim before it called, and what we said of it before
            // still holds.
            Err(error) if error.is_transient() => {
                let node = Arc::clone(&self.node);
                let uid = claim.uid.clone();
                let repeated = tokio::task::spawn_blocking(move || node.repeat(&uid)).await??;
                return repeated.ok_or_else(|| error.into());
            }
            Err(error) => return Err(error.into()),
        };
        fault::point_async("prepare-claim-read").await;
        let allocated =
            AllocatedClaim::check(from_api, &claim.uid, &claim.namespace, &claim.name, &self.pool)?;
        // What is prepared was allocated by whoever could; it stays as it is.
        if self.mode == Mode::Stock
            && !self.node.journal.watch().borrow().claims.contains_key(&claim.uid)
        {
            claim::check_without_controller(from_api)?;
        }
        let hardware = Arc::clone(&self.hardware.borrow());
        let (node, attempt) = (Arc::clone(&self.node), Arc::clone(attempt));
        tokio::task::spawn_blocking(move || node.prepare(&allocated, &hardware, &attempt)).await?
    }

    async fn unprepare_one(&self, asked: &AskedClaim) -> Result<(), UnprepareError> {
        // What cannot be named was never prepared.
        let Ok(uid) = ClaimUid::new(&asked.uid) else { return Ok(()) };
        fault::point_async("unprepare-asked").await;
        let node = Arc::clone(&self.node);
        tokio::task::spawn_blocking(move || node.unprepare(&uid)).await?
    }
}

impl Node {
    /// Prepares `claim`: decides and acts under the journal's lock.
    ///
    /// # Guarantees
    /// When it fails, the node is as before. When the process dies in it, or what was done cannot
    /// be taken back, the journal says `Started`: repair, the next Prepare and Unprepare take
    /// it back. So it says while the claim waits for its MPS control daemon: what it is to have
    /// stays its own, and the daemon wanted.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn prepare(
        &self,
        claim: &AllocatedClaim,
        hardware: &HardwareState,
        attempt: &Attempt,
    ) -> Result<Vec<PreparedDevice>, PrepareError> {
        let mut journal = self.journal.lock()?;
        if !attempt.stands()? {
            return Err(PrepareError::Unprepared);
        }
        let nothing = Inventory::default();
        let inventory = match (hardware, journal.get(&claim.uid)) {
            (HardwareState::Known(inventory), _) => inventory,
            // What is prepared can be repeated without looking at the GPU.
            (_, Some(record)) if record.state == State::Completed => &nothing,
            (HardwareState::Unknown { reason, .. }, _) => {
                return Err(PrepareError::NoHardware { reason: reason.clone() });
            }
        };
        let ratio = self.memory_ratio;
        let mut record = match plan(claim, inventory, ratio, journal.journal(), &self.library.hash)?
        {
            Decision::Repeat(record) => {
                self.mps.want(journal.journal(), None).map_err(MpsError::from)?;
                // For another pod that shares the claim, perhaps, and begins now.
                self.mps.check(&record)?;
                self.executor.execute(&steps(&claim.uid, &record, &self.paths)?)?;
                return Ok(answer(&claim.uid, &record));
            }
            Decision::Prepare(record) => {
                let context_bytes = self.context_memory.bytes();
                ClaimRecord { intercept: self.stand()?, context_bytes, ..record }
            }
        };
        // Found under the lock, a claim that was only started is what a dead instance left, or
        // waits for its MPS control daemon.
        if let Some(left) = journal.get(&claim.uid) {
            self.executor.undo(&undo_steps(&claim.uid, left))?;
        }
        let steps = steps(&claim.uid, &record, &self.paths)?;
        self.mps.admit(&record)?;
        self.library.ensure(&self.paths)?;
        // One that waits for its daemon is not written anew at each attempt: who watches the
        // journal would see news.
        if journal.get(&claim.uid) != Some(&record) {
            journal.put(claim.uid.clone(), record.clone())?;
        }
        fault::point("prepare-started");
        if let Err(error) = self.mps.want(journal.journal(), None) {
            self.take_back(&claim.uid, &record, &mut journal);
            return Err(MpsError::from(error).into());
        }
        fault::point("prepare-mps-wanted");
        self.mps.check(&record)?;
        if let Err(error) = self.executor.execute(&steps) {
            self.take_back(&claim.uid, &record, &mut journal);
            return Err(error.into());
        }
        let undo = record.clone();
        record.state = State::Completed;
        let devices = answer(&claim.uid, &record);
        if let Err(error) = journal.put(claim.uid.clone(), record) {
            self.take_back(&claim.uid, &undo, &mut journal);
            return Err(error.into());
        }
        fault::point("prepare-completed");
        Ok(devices)
    }

    /// Where the interceptor stands in containers of a claim that is prepared now.
    ///
    /// # Errors
    /// [`PrepareError::NoDriverLibrary`].
    fn stand(&self) -> Result<Stand, PrepareError> {
        let stand = self.intercept.stand(self.executor.base().replaceable());
        stand.ok_or(PrepareError::NoDriverLibrary)
    }

    /// Takes back what was done of a Prepare that failed. The journal forgets the claim only when
    /// nothing of it is left.
    fn take_back(&self, claim: &ClaimUid, record: &ClaimRecord, journal: &mut LockedJournal<'_>) {
        if let Err(error) = self.forget(claim, record, journal) {
            tracing::error!(error = %chain(&error), "a failed Prepare is not taken back; the claim stays in the journal as started");
        }
    }

    /// The answer for a claim that is prepared, with its files made sure of; `None` for one that is
    /// not.
    ///
    /// # Errors
    /// [`PrepareError`].
    pub fn repeat(&self, claim: &ClaimUid) -> Result<Option<Vec<PreparedDevice>>, PrepareError> {
        let journal = self.journal.lock()?;
        let Some(record) = journal.get(claim).filter(|record| record.state == State::Completed)
        else {
            return Ok(None);
        };
        self.mps.want(journal.journal(), None).map_err(MpsError::from)?;
        self.executor.execute(&steps(claim, record, &self.paths)?)?;
        Ok(Some(answer(claim, record)))
    }

    /// Unprepares a claim, with nothing but the journal and the file system. One that is not
    /// prepared is no error.
    ///
    /// # Errors
    /// [`UnprepareError`]; doing it again is right.
    pub fn unprepare(&self, claim: &ClaimUid) -> Result<(), UnprepareError> {
        let mut journal = self.journal.lock()?;
        // First, or an attempt that waits would prepare the claim after this.
        attempts::end(&self.paths, claim, &journal)?;
        let Some(record) = journal.get(claim).cloned() else { return Ok(()) };
        self.forget(claim, &record, &mut journal)?;
        fault::point("unprepare-forgotten");
        Ok(())
    }

    /// Takes back what was done for a claim, and forgets it.
    fn forget(
        &self,
        claim: &ClaimUid,
        record: &ClaimRecord,
        journal: &mut LockedJournal<'_>,
    ) -> Result<(), UnprepareError> {
        self.executor.undo(&undo_steps(claim, record))?;
        fault::point("unprepare-undone");
        // Before the journal forgets it: who dies in between wants the daemon again, and gives it
        // up again.
        self.mps.want(journal.journal(), Some(claim))?;
        fault::point("unprepare-mps-given-up");
        Ok(journal.remove(claim)?)
    }
}

/// The kubelet's calls, each in a task that outlives them.
#[derive(Clone, Debug)]
pub struct DetachedClaims(pub Arc<Preparer>);

impl Claims for DetachedClaims {
    async fn prepare(&self, claim: AskedClaim) -> Result<Vec<PreparedDevice>, String> {
        let span = tracing::info_span!("prepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let (until, preparer) = (Instant::now() + PATIENCE, Arc::clone(&self.0));
        let work = async move {
            let timer = preparer.metrics.time(Operation::Prepare);
            let result = preparer.prepare_patiently(&claim, until).await;
            timer.done(result.is_ok());
            match &result {
                Ok(devices) => tracing::info!(devices = devices.len(), "prepared"),
                Err(error) => tracing::error!(error = %chain(error), "not prepared"),
            }
            result
        };
        let result =
            tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }

    async fn unprepare(&self, claim: AskedClaim) -> Result<(), String> {
        let span = tracing::info_span!("unprepare", claim = %format_args!("{}/{}", claim.namespace, claim.name), uid = %claim.uid);
        let preparer = Arc::clone(&self.0);
        let work = async move {
            let timer = preparer.metrics.time(Operation::Unprepare);
            let result = preparer.unprepare_one(&claim).await;
            timer.done(result.is_ok());
            match &result {
                Ok(()) => tracing::info!("unprepared"),
                Err(error) => {
                    tracing::error!(error = %chain(error), "not unprepared; the pod's deletion waits")
                }
            }
            result
        };
        let result =
            tokio::spawn(work.instrument(span)).await.unwrap_or_else(|error| Err(error.into()));
        result.map_err(|error| chain(&error))
    }
}

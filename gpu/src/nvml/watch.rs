//! Health watch through NVML events and polling.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError};
use tessera_api::names::GpuUuid;

use super::raw::{EventSet, HandleId, RawEvent};
use super::session::Session;
use crate::library::{HealthEvent, HealthEventKind, HealthWatch, LibraryError};
use crate::xid::Xid;

const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const DOUBLE_BIT_ECC: u64 = nvmlEventTypeDoubleBitEccError as u64;

/// Watches GPUs with an NVML event set and by polling them.
pub(super) struct NvmlWatch {
    session: Arc<Session>,
    gpus: BTreeMap<GpuUuid, Presence>,
    set: RegisteredGpus,
}

/// Presence of a GPU at the last poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Present,
    Lost,
}

/// An event set and its GPUs. NVML cannot remove GPUs from a set: when one is lost, a new set is
/// created.
struct RegisteredGpus {
    set: EventSet,
    gpus: BTreeMap<HandleId, GpuUuid>,
}

impl NvmlWatch {
    pub(super) fn start(session: Arc<Session>, gpus: &[GpuUuid]) -> Result<Self, LibraryError> {
        let gpus = gpus.iter().map(|gpu| (gpu.clone(), Presence::Present)).collect();
        let set = RegisteredGpus::new(&session, &gpus)?;
        Ok(Self { session, gpus, set })
    }

    /// Polls every GPU, reports changes of presence, and recreates the event set after one. Returns
    /// true if a presence changed.
    fn poll_all(
        &mut self,
        uncertainty: HealthUncertainty,
        events: &mut Vec<HealthEvent>,
    ) -> Result<bool, LibraryError> {
        let mut changed = false;
        for (gpu, presence) in &mut self.gpus {
            let now = poll(&self.session, gpu, *presence, uncertainty);
            if now != *presence {
                let kind = if now == Presence::Lost {
                    HealthEventKind::Lost
                } else {
                    HealthEventKind::Back
                };
                events.push(HealthEvent { gpu: gpu.clone(), kind });
                *presence = now;
                changed = true;
            }
        }
        if changed {
            // Events that remain in the old set would be lost: read them first.
            self.drain(events);
            self.set = RegisteredGpus::new(&self.session, &self.gpus)?;
        }
        Ok(changed)
    }

    /// Handles the set's report that one of its GPUs is lost, without naming it. While that GPU is
    /// in the set, waiting returns at once.
    fn find_lost(
        &mut self,
        timeout: Duration,
        events: &mut Vec<HealthEvent>,
    ) -> Result<(), LibraryError> {
        if !self.poll_all(HealthUncertainty::OneIsLost, events)? {
            // All GPUs answer, which contradicts the report. The pause prevents a busy loop.
            thread::park_timeout(timeout);
        }
        Ok(())
    }

    /// Reads the pending events without waiting.
    fn drain(&self, events: &mut Vec<HealthEvent>) {
        while let Ok(event) = self.set.set.wait(0) {
            events.extend(self.set.translate(&event));
        }
    }
}

/// Prior knowledge about the GPUs that are polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HealthUncertainty {
    /// No prior knowledge.
    None,
    /// The event set has reported that one of the GPUs is lost.
    OneIsLost,
}

/// Returns the presence of a GPU.
///
/// A GPU is present unless it answers "lost"; other errors are reported elsewhere. If one GPU is
/// known to be lost, a GPU that returns any error is the lost one. A lost GPU is back only after a
/// valid answer. The poll reads memory, because that answer comes from the kernel driver's state of
/// the GPU and not from NVML's cache.
fn poll(
    session: &Session,
    gpu: &GpuUuid,
    before: Presence,
    uncertainty: HealthUncertainty,
) -> Presence {
    let answer =
        session.nvml().device_by_uuid(gpu.as_str()).and_then(|device| device.memory_info());
    match answer {
        Ok(_) => Presence::Present,
        Err(NvmlError::GpuLost | NvmlError::NotFound) => Presence::Lost,
        Err(_) if uncertainty == HealthUncertainty::OneIsLost => Presence::Lost,
        Err(_) => before,
    }
}

/// Result of waiting on an event set.
enum WaitResult {
    /// An event, or `None` after the timeout.
    Events(Option<HealthEvent>),
    /// One of the GPUs is lost.
    OneIsLost,
}

impl RegisteredGpus {
    fn new(
        session: &Arc<Session>,
        gpus: &BTreeMap<GpuUuid, Presence>,
    ) -> Result<Self, LibraryError> {
        let failed = |source| LibraryError::Call { call: "nvmlEventSetCreate", source };
        let set = EventSet::create(Arc::clone(session)).map_err(failed)?;
        let mut registered = Self { set, gpus: BTreeMap::new() };
        for gpu in
            gpus.iter().filter(|(_, presence)| **presence == Presence::Present).map(|(gpu, _)| gpu)
        {
            if let Err(error) = registered.add(session, gpu) {
                // The GPU is still polled.
                tracing::warn!(%gpu, %error, "cannot watch health events of GPU");
            }
        }
        Ok(registered)
    }

    fn add(&mut self, session: &Session, gpu: &GpuUuid) -> Result<(), NvmlError> {
        let device = session.nvml().device_by_uuid(gpu.as_str())?;
        let supported = device.supported_event_types()?.bits();
        let kinds = (XID | DOUBLE_BIT_ECC) & supported;
        if kinds == 0 {
            return Err(NvmlError::NotSupported);
        }
        self.set.register(&device, kinds)?;
        self.gpus.insert(HandleId::of(&device), gpu.clone());
        Ok(())
    }

    fn translate(&self, event: &RawEvent) -> Option<HealthEvent> {
        let gpu = self.gpus.get(&event.device)?.clone();
        let kind = match event.kind {
            XID => HealthEventKind::Xid(Xid(event.data)),
            DOUBLE_BIT_ECC => HealthEventKind::DoubleBitEcc,
            _ => return None,
        };
        Some(HealthEvent { gpu, kind })
    }

    /// Waits for the first event.
    fn wait(&self, timeout: Duration) -> Result<WaitResult, NvmlError> {
        if self.gpus.is_empty() {
            // NVML does not document waiting on an empty set.
            thread::park_timeout(timeout);
            return Ok(WaitResult::Events(None));
        }
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        match self.set.wait(milliseconds) {
            Ok(event) => Ok(WaitResult::Events(self.translate(&event))),
            Err(NvmlError::Timeout) => Ok(WaitResult::Events(None)),
            Err(NvmlError::GpuLost) => Ok(WaitResult::OneIsLost),
            Err(error) => Err(error),
        }
    }
}

impl HealthWatch for NvmlWatch {
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError> {
        let mut events = Vec::new();
        // Polled first: a set with a lost GPU does not wait, and a loss before the watch must not
        // wait for the timeout.
        self.poll_all(HealthUncertainty::None, &mut events)?;
        if !events.is_empty() {
            return Ok(events);
        }
        let waited = self.set.wait(timeout);
        let failed = |source| LibraryError::Call { call: "nvmlEventSetWait_v2", source };
        match waited.map_err(failed)? {
            WaitResult::Events(event) => {
                events.extend(event);
                self.drain(&mut events);
                self.poll_all(HealthUncertainty::None, &mut events)?;
            }
            WaitResult::OneIsLost => self.find_lost(timeout, &mut events)?,
        }
        Ok(events)
    }
}

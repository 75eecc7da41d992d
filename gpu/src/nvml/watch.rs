//! Waiting for what happens to GPUs.

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

/// Watches GPUs by an NVML event set and by asking them.
pub(super) struct NvmlWatch {
    session: Arc<Session>,
    gpus: BTreeMap<GpuUuid, Presence>,
    set: Registered,
}

/// Whether a GPU answered when it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    There,
    Lost,
}

/// An event set and the GPUs in it. GPUs cannot be taken out of a set: when one is lost, a new set is made.
struct Registered {
    set: EventSet,
    gpus: BTreeMap<HandleId, GpuUuid>,
}

impl NvmlWatch {
    pub(super) fn start(session: Arc<Session>, gpus: &[GpuUuid]) -> Result<Self, LibraryError> {
        let gpus = gpus.iter().map(|gpu| (gpu.clone(), Presence::There)).collect();
        let set = Registered::new(&session, &gpus)?;
        Ok(Self { session, gpus, set })
    }

    /// Asks every GPU whether it is there; reports what has changed, and registers anew if so.
    fn ask_all(&mut self, events: &mut Vec<HealthEvent>) -> Result<(), LibraryError> {
        let mut changed = false;
        for (gpu, presence) in &mut self.gpus {
            let now = ask(&self.session, gpu);
            if now != *presence {
                let kind = if now == Presence::Lost { HealthEventKind::Lost } else { HealthEventKind::Back };
                events.push(HealthEvent { gpu: gpu.clone(), kind });
                *presence = now;
                changed = true;
            }
        }
        if changed {
            // What the old set still holds is lost with it: take it out first.
            self.drain(events);
            self.set = Registered::new(&self.session, &self.gpus)?;
        }
        Ok(())
    }

    /// Takes what is there without waiting.
    fn drain(&self, events: &mut Vec<HealthEvent>) {
        while let Ok(event) = self.set.set.wait(0) {
            events.extend(self.set.translate(&event));
        }
    }
}

/// A GPU that answers anything but "lost" is there; what else is wrong with it shows elsewhere. Memory is asked for because
/// that answer comes from the GPU's own kernel driver state, not from what NVML remembers.
fn ask(session: &Session, gpu: &GpuUuid) -> Presence {
    let answer = session.nvml().device_by_uuid(gpu.as_str()).and_then(|device| device.memory_info());
    match answer {
        Err(NvmlError::GpuLost | NvmlError::NotFound) => Presence::Lost,
        _ => Presence::There,
    }
}

impl Registered {
    fn new(session: &Arc<Session>, gpus: &BTreeMap<GpuUuid, Presence>) -> Result<Self, LibraryError> {
        let failed = |source| LibraryError::Call { call: "nvmlEventSetCreate", source };
        let set = EventSet::create(Arc::clone(session)).map_err(failed)?;
        let mut registered = Self { set, gpus: BTreeMap::new() };
        for gpu in gpus.iter().filter(|(_, presence)| **presence == Presence::There).map(|(gpu, _)| gpu) {
            if let Err(error) = registered.add(session, gpu) {
                // It is still asked whether it is there.
                tracing::warn!(%gpu, %error, "the GPU does not report events");
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
    fn wait(&self, timeout: Duration) -> Result<Option<HealthEvent>, NvmlError> {
        if self.gpus.is_empty() {
            // NVML does not say what waiting on an empty set does.
            thread::park_timeout(timeout);
            return Ok(None);
        }
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        match self.set.wait(milliseconds) {
            Ok(event) => Ok(self.translate(&event)),
            // Lost GPUs are found by asking.
            Err(NvmlError::Timeout | NvmlError::GpuLost) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl HealthWatch for NvmlWatch {
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError> {
        let mut events = Vec::new();
        // First: a set with a lost GPU in it does not wait, and a loss at the start must not wait for the time-out.
        self.ask_all(&mut events)?;
        if !events.is_empty() {
            return Ok(events);
        }
        let waited = self.set.wait(timeout);
        let failed = |source| LibraryError::Call { call: "nvmlEventSetWait_v2", source };
        events.extend(waited.map_err(failed)?);
        self.drain(&mut events);
        self.ask_all(&mut events)?;
        Ok(events)
    }
}

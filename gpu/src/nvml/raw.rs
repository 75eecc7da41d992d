//! NVML calls for which the wrapper has no safe function.

pub(super) mod mig;

use std::sync::Arc;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH, nvmlIntNvLinkDeviceType_t,
};

use super::session::Session;

/// Returns true if the other end of a link is an NVSwitch.
///
/// The wrapper's `remote_device_type` passes a temporary to NVML and always returns "unknown"
/// (nvml-wrapper 0.13.0).
pub(super) fn leads_to_switch(device: &Device<'_>, link: u32) -> Result<bool, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind: nvmlIntNvLinkDeviceType_t = 0;
    // SAFETY: the handle belongs to this session, and the result outlives the call.
    nvml_try(unsafe { call(device.handle(), link, &mut kind) })?;
    Ok(kind == nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH)
}

/// A device handle that is only compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HandleId(usize);

impl HandleId {
    pub(super) fn of(device: &Device<'_>) -> Self {
        // SAFETY: the handle is only compared, never used.
        Self(unsafe { device.handle() } as usize)
    }
}

/// An event as NVML reports it.
pub(super) struct RawEvent {
    pub(super) device: HandleId,
    pub(super) kind: u64,
    pub(super) data: u64,
}

/// An event set that owns its session. The wrapper's event set borrows it and could not be stored
/// beside it.
pub(super) struct EventSet {
    session: Arc<Session>,
    set: nvmlEventSet_t,
}

// SAFETY: NVML is thread-safe ("the NVML library is thread-safe", NVML reference, section 1.2), and
// the pointer is opaque and only passed back to NVML.
unsafe impl Send for EventSet {}

impl EventSet {
    pub(super) fn create(session: Arc<Session>) -> Result<Self, NvmlError> {
        let mut set: nvmlEventSet_t = std::ptr::null_mut();
        let call = nvml_sym(session.nvml().lib().nvmlEventSetCreate.as_ref())?;
        // SAFETY: NVML is initialised while the session lives, and the result outlives the call.
        nvml_try(unsafe { call(&mut set) })?;
        Ok(Self { session, set })
    }

    /// Registers a device's events; `kinds` has bits of `nvmlEventType`.
    pub(super) fn register(&self, device: &Device<'_>, kinds: u64) -> Result<(), NvmlError> {
        let call = nvml_sym(self.session.nvml().lib().nvmlDeviceRegisterEvents.as_ref())?;
        // SAFETY: the handle is of the same library, and the set has not been freed.
        nvml_try(unsafe { call(device.handle(), kinds, self.set) })
    }

    /// Waits for an event.
    pub(super) fn wait(&self, timeout_ms: u32) -> Result<RawEvent, NvmlError> {
        let call = nvml_sym(self.session.nvml().lib().nvmlEventSetWait_v2.as_ref())?;
        let mut data = nvmlEventData_t {
            device: std::ptr::null_mut::<()>() as nvmlDevice_t,
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        // SAFETY: the set has not been freed, and the struct is complete and outlives the call.
        nvml_try(unsafe { call(self.set, &mut data, timeout_ms) })?;
        Ok(RawEvent {
            device: HandleId(data.device as usize),
            kind: data.eventType,
            data: data.eventData,
        })
    }
}

impl Drop for EventSet {
    fn drop(&mut self) {
        if let Ok(call) = nvml_sym(self.session.nvml().lib().nvmlEventSetFree.as_ref()) {
            // SAFETY: the set is freed once, before its session. An error of the call cannot be
            // handled.
            let _ = unsafe { call(self.set) };
        }
    }
}

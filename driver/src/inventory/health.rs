//! Health of GPUs as the kubelet reports it.

use std::collections::BTreeSet;

use tessera_api::{
    gpu::{Health, UnpublishedReason},
    names::{GpuUuid, PoolName},
};

use super::HardwareState;
use crate::kubelet::health::DeviceHealth;

/// Returns the health of each GPU that is published or in use by a claim.
pub(super) fn health_of(
    state: &HardwareState,
    pool: &PoolName,
    in_use: &BTreeSet<GpuUuid>,
) -> Vec<DeviceHealth> {
    let device = |gpu: &GpuUuid, healthy, message: String| DeviceHealth {
        pool: pool.to_string(),
        device: gpu.device_name().to_string(),
        healthy,
        message,
    };
    let inventory = match state {
        HardwareState::Unknown { reason, .. } => {
            return in_use.iter().map(|gpu| device(gpu, None, reason.clone())).collect();
        }
        HardwareState::Known(inventory) => inventory,
    };
    let mut devices: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| match &gpu.health {
            Health::Healthy => device(&gpu.uuid, Some(true), String::new()),
            Health::Unhealthy { message, .. } => device(&gpu.uuid, Some(false), message.clone()),
        })
        .collect();
    for gpu in in_use.iter().filter(|gpu| inventory.gpu(gpu).is_none()) {
        let known =
            inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
        let (healthy, message) = match known.map(|known| &known.reason) {
            None => (Some(false), "the GPU is gone".to_owned()),
            Some(reason @ (UnpublishedReason::Lost | UnpublishedReason::Unreadable { .. })) => {
                (Some(false), reason.to_string())
            }
            // It is not published, for a reason that does not depend on its health.
            Some(reason) => (None, reason.to_string()),
        };
        devices.push(device(gpu, healthy, message));
    }
    devices
}

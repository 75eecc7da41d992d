//! Room: devices that are kept for pods while other pods are evicted from there. To the allocator
//! they are taken; to everything else they are not.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_allocator::model::{DeviceId, DeviceResult, DeviceUsage, PodUid};

use crate::index::Index;
use crate::multimap::Multimap;

/// The room of all pods.
#[derive(Debug, Default)]
pub(crate) struct Room {
    of_pods: BTreeMap<PodUid, PodRoom>,
    by_device: Multimap<DeviceId, PodUid>,
}

#[derive(Debug)]
struct PodRoom {
    priority: i32,
    results: Arc<[DeviceResult]>,
}

impl Index {
    /// Keeps these devices for a pod that will have them, instead of those before.
    pub fn keep_room(&mut self, pod: &PodUid, priority: i32, results: Arc<[DeviceResult]>) {
        self.end_room(pod);
        for result in results.iter() {
            self.room.by_device.insert(result.device.clone(), pod.clone());
            self.sums.unplanned.insert(result.device.clone());
        }
        self.room.of_pods.insert(pod.clone(), PodRoom { priority, results });
    }

    /// Ends the room of a pod.
    pub fn end_room(&mut self, pod: &PodUid) {
        let Some(room) = self.room.of_pods.remove(pod) else { return };
        for result in room.results.iter() {
            self.room.by_device.remove(&result.device, pod);
            self.sums.unplanned.insert(result.device.clone());
        }
    }

    /// Returns the usage of a device with the room on it.
    pub(crate) fn usage_with_room(&self, device: &DeviceId) -> Option<DeviceUsage> {
        self.usage_with(device, |_, _| true)
    }

    /// Returns the usage of a device with the room of pods other than this one that have at least
    /// this priority.
    pub(crate) fn usage_with_room_for(
        &self,
        device: &DeviceId,
        pod: &PodUid,
        priority: i32,
    ) -> Option<DeviceUsage> {
        self.usage_with(device, |other, room| other != pod && room.priority >= priority)
    }

    fn usage_with(
        &self,
        device: &DeviceId,
        counts: impl Fn(&PodUid, &PodRoom) -> bool,
    ) -> Option<DeviceUsage> {
        let used = self.sums.usage.get(device).cloned();
        let pods = self.room.by_device.get(device);
        let rooms = pods.filter_map(|pod| self.room.of_pods.get_key_value(pod));
        rooms.filter(|(pod, room)| counts(pod, room)).fold(used, |used, (_, room)| {
            Some(used.unwrap_or_default().plus(device, &room.results))
        })
    }
}

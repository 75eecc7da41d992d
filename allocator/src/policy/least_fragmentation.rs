//! Where the least becomes useless to the requests that are expected. Of two devices for which that
//! comes to the same, as where a node has no CPU for others anyway, the one of which less is left,
//! and then the one that fewer claims hold.

use super::{DeviceView, NodeView, Rank, Rule};

pub(super) struct LeastFragmentation;

impl Rule for LeastFragmentation {
    fn device(&self, device: &DeviceView<'_>) -> Option<Rank> {
        let picture = device.ranking.picture();
        let share = picture.share(device.ranking, device.asked, device.candidate);
        let rise = picture.rise(&device.ranking.outlook, &[(device.candidate, share)]);
        let left = i64::from(picture.left(device.candidate).thousandths());
        Some((rise.steps(), (left << 32) + i64::from(device.tasks())))
    }

    fn node(&self, node: &NodeView<'_>) -> Rank {
        let (ranking, picture) = (node.ranking, node.ranking.picture());
        let taken: Vec<_> = node
            .shape
            .chosen(node.chosen)
            .filter(|(asked, _)| asked.request.admin != Some(true))
            .map(|(asked, candidate)| (candidate, picture.share(ranking, asked, candidate)))
            .collect();
        (picture.rise(&ranking.outlook, &taken).steps(), 0)
    }
}

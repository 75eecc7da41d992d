//! The pieces of kube-controller-manager that matter here.

use crate::api::ApiServer;

/// Running controllers.
pub struct Controllers;

impl Controllers {
    pub(crate) fn start(_api: &ApiServer) -> Self {
        Self
    }

    pub(crate) async fn stop(self) {}
}

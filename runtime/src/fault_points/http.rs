//! HTTP routes that list and arm points.

use std::collections::BTreeMap;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::routing::{delete, get, put};
use axum::{Json, Router};

use super::{Fault, FaultPointState, FaultPoints, UndeclaredPoint};

impl FaultPoints {
    /// Returns the routes described in [`super`], to be merged into the program's own server.
    pub fn routes(&'static self) -> Router {
        let list = move || async move { Json(self.all()) };
        let arm = move |Path((name, fault)): Path<(String, String)>| async move {
            let fault = match fault.as_str() {
                "kill" => Fault::Kill,
                "hold" => Fault::Hold,
                other => {
                    return Err((
                        StatusCode::BAD_REQUEST,
                        format!("invalid fault `{other}`: use kill or hold\n"),
                    ));
                }
            };
            self.respond(self.arm(&name, fault))
        };
        let disarm =
            move |Path(name): Path<String>| async move { self.respond(self.disarm(&name)) };
        Router::new()
            .route("/fault-points", get(list))
            .route("/fault-points/{name}/{fault}", put(arm))
            .route("/fault-points/{name}", delete(disarm))
    }

    fn respond(
        &self,
        done: Result<(), UndeclaredPoint>,
    ) -> Result<Json<BTreeMap<&'static str, FaultPointState>>, (StatusCode, String)> {
        done.map(|()| Json(self.all()))
            .map_err(|error| (StatusCode::NOT_FOUND, format!("{error}\n")))
    }
}

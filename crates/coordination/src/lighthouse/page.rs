//! What the lighthouse shows over HTTP on its port: a page that needs no network, the events that keep it up to date (`live`), the same as JSON,
//! and metrics. Nothing here changes anything (L38).

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use serde::Serialize;
use tonic::service::Routes;

use super::frontend::Frontend;
use super::live::{Live, MAX_LISTENERS};
use super::metrics;
use super::status::known;
use crate::exposition;
use crate::serve::unknown;
use crate::wire::{MAX_MESSAGE_BYTES, oxccl};

/// gRPC and pages in one router, all but torchft's two calls.
pub(crate) fn routes(lighthouse: Frontend) -> Router {
    let ours = oxccl::oxccl_lighthouse_server::OxcclLighthouseServer::new(lighthouse.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let live = Live::new(lighthouse.clone());
    let (counted, for_metrics, for_targets) = (live.clone(), lighthouse.clone(), lighthouse.clone());
    Routes::new(ours)
        .into_axum_router()
        .route("/", get(dashboard))
        .route("/events", get(move || events(live.clone())))
        .route("/status", get(move || status(lighthouse.clone())))
        .route(
            "/metrics",
            get(move || metrics(for_metrics.clone(), counted.clone())),
        )
        .route("/targets", get(move || targets(for_targets.clone())))
        .fallback(unknown)
}

fn json<T: Serialize>(value: &T) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => (
            [
                (header::CONTENT_TYPE, "application/json"),
                (header::CACHE_CONTROL, "no-store"),
            ],
            text,
        )
            .into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

async fn status(frontend: Frontend) -> Response {
    match known(&frontend).await {
        Some(look) => json(&look.status),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn targets(frontend: Frontend) -> Response {
    match known(&frontend).await {
        Some(look) => json(&metrics::targets(&look.status)),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn metrics(frontend: Frontend, live: Arc<Live>) -> Response {
    let Some(look) = known(&frontend).await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    (
        [(header::CONTENT_TYPE, exposition::CONTENT_TYPE)],
        metrics::text(&look, live.counts()),
    )
        .into_response()
}

/// The events of the dashboard, until the listener goes.
async fn events(live: Arc<Live>) -> Response {
    let Some(listener) = live.listen() else {
        let text = format!("{MAX_LISTENERS} dashboards of this job are open, the most that there may be\n");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    };
    (
        [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-store"),
        ],
        Body::from_stream(listener),
    )
        .into_response()
}

/// The page loads nothing and talks to this lighthouse only.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:";

async fn dashboard() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(PAGE))
}

/// Ids come from the network: the page writes them as text, never as markup.
const PAGE: &str = include_str!("page.html");

//! What a normalized run becomes at each kind of server. `[A-62]`
//!
//! Lives on: the main task. View: one request. Bound: the request's own size.
use iop_proto::catalog::{Operation, ProviderKind};
use iop_proto::domain::RunRequest;
use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};

use super::{Denied, Instance, Work, ollama, openai};
use crate::normalized::{Dialect, RunPlan};
use crate::provider::{Carried, ProviderRequest};

impl Instance {
    /// The call that serves a run. Its input and target decide, and nothing of its metadata: that is
    /// the caller's own. `[R-084]` `[R-300]`
    ///
    /// # Errors
    /// Why no provider is called.
    pub(crate) fn resolve_run(&self, request: RunRequest) -> Result<Work, Denied> {
        match self.kind {
            ProviderKind::Ollama => self.native(&request),
            ProviderKind::OpenAiCompat | ProviderKind::Vllm => self.direct(request),
        }
    }

    fn native(&self, request: &RunRequest) -> Result<Work, Denied> {
        let (path, body) = ollama::call(&request.input, &request.target)?;
        let request = ProviderRequest {
            method: Method::POST,
            url: self.base.join(path)?,
            headers: json(),
            body: body.into(),
            credential: Carried::None,
        };
        Ok(Work::Run(Box::new(RunPlan {
            dialect: Dialect::Ollama,
            request,
            fallback: None,
        })))
    }

    fn direct(&self, request: RunRequest) -> Result<Work, Denied> {
        let RunRequest { input, target, .. } = request;
        let (operation, body, has_tools) = openai::call(&input, &target)?;
        let request = ProviderRequest {
            method: Method::POST,
            url: self.base.join(self.path_of(operation))?,
            headers: json(),
            body,
            credential: Carried::None,
        };
        let fallback = has_tools.then(|| openai::Fallback {
            method: request.method.clone(),
            url: request.url.clone(),
            headers: request.headers.clone(),
            input,
            target,
        });
        Ok(Work::Run(Box::new(RunPlan {
            dialect: Dialect::OpenAi,
            request,
            fallback,
        })))
    }

    /// The profile's path of an operation, else the surface's own.
    fn path_of(&self, operation: Operation) -> &str {
        let named = self.adapter.profile.as_ref().and_then(|profile| {
            let mut operations = profile.operations.iter();
            operations.find(|named| operation.wire_name() == Some(&named.name))
        });
        named.map_or_else(|| operation.path(), |named| &named.path)
    }
}

/// Headers of a request of our own.
pub(super) fn json() -> HeaderMap {
    let json = HeaderValue::from_static("application/json");
    HeaderMap::from_iter([(CONTENT_TYPE, json)])
}

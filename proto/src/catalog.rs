//! Words of the catalog: operations, provider kinds, categories. Closed sets with their spellings.
//!
//! Lives on: any thread. Bound: fixed sets.

/// What a client asks of a provider; the names of a catalog's `operations` list. `[D-62]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Operation {
    ChatCompletions,
    Completions,
    Embeddings,
    Responses,
    Messages,
    CountTokens,
}

impl Operation {
    pub const ALL: [Self; 6] = [
        Self::ChatCompletions,
        Self::Completions,
        Self::Embeddings,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
    ];

    /// Spelling in configuration and metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|operation| operation.name() == name)
    }

    /// `ProviderTunnelRequest.operation` may carry this name; the others travel by path. `[R-097]` `[D-62]`
    #[must_use]
    pub const fn wire_name(self) -> Option<&'static str> {
        match self {
            Self::ChatCompletions | Self::Responses | Self::Messages | Self::CountTokens => {
                Some(self.name())
            }
            Self::Completions | Self::Embeddings => None,
        }
    }

    /// Path on the client's side, and on the wire as the mixed-version fallback. `[R-098]`
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
        }
    }
}

/// A set of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationSet(u8);

impl OperationSet {
    pub const ALL: Self = Self((1 << Operation::ALL.len()) - 1);

    #[must_use]
    pub const fn with(self, operation: Operation) -> Self {
        Self(self.0 | 1 << operation as u8)
    }

    #[must_use]
    pub const fn contains(self, operation: Operation) -> bool {
        self.0 & (1 << operation as u8) != 0
    }

    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Adapter and provider type. Decides the path of a request, never whether it is a candidate. `[A-62]` `[R-237]`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProviderKind {
    OpenAiCompat,
    Vllm,
    Ollama,
}

impl ProviderKind {
    pub const ALL: [Self; 3] = [Self::OpenAiCompat, Self::Vllm, Self::Ollama];

    /// Spelling of the adapter type on the wire and in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenAiCompat => "openai_compat",
            Self::Vllm => "vllm",
            Self::Ollama => "ollama",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Raw tunnel, as opposed to a normalized run. `[A-62]`
    #[must_use]
    pub const fn is_tunnel(self) -> bool {
        match self {
            Self::OpenAiCompat | Self::Vllm => true,
            Self::Ollama => false,
        }
    }

    /// Operations of a provider whose catalog entry lists none. `[D-62]`
    #[must_use]
    pub const fn operations_default(self) -> OperationSet {
        match self {
            Self::OpenAiCompat | Self::Vllm => OperationSet::ALL,
            Self::Ollama => OperationSet(0)
                .with(Operation::ChatCompletions)
                .with(Operation::Completions),
        }
    }
}

/// Resource kind of a provider snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    Api,
    LocalInference,
}

impl Category {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::LocalInference => "local_inference",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Api, Self::LocalInference]
            .into_iter()
            .find(|kind| kind.name() == name)
    }
}

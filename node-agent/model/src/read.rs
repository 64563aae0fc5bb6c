//! From a header to a model: the one place where metadata and tensors are read.

use std::ops::Range;

use prima_gguf::Gguf;

use crate::error::ModelError;
use crate::families::{
    self, EmbeddingScale, Family, HeadNormKind, Presence, Softcap, WindowedRope, Windows,
};
use crate::keys::{Keys, MAX_SIZE, Pattern};
use crate::rope::{Divisors, Rope, Yarn};
use crate::spec::{
    Attention, FeedForward, HeadNorms, LayerSpec, ModelSpec, Pooling, Projection, Temperature,
};
use crate::tensor_rows::TensorRows;
use crate::tensors::Tensors;

const EMBEDDING: &str = "token_embd.weight";
const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";
const SCALING: &str = "rope.scaling.type";
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

impl ModelSpec {
    /// The model with this header. `file`, a path or an address, names it in errors.
    ///
    /// # Errors
    /// [`ModelError`]: a family or an option that prima does not compute; metadata or tensors that are missing, contradict each other, or
    /// are more than the family has.
    pub fn read(file: &str, gguf: &Gguf) -> Result<ModelSpec, ModelError> {
        let name = gguf.metadata.require_str("general.architecture")?;
        let family = families::by_name(name).ok_or_else(|| ModelError::UnknownArchitecture {
            file: file.to_owned(),
            found: name.to_owned(),
            known: families::names().collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys {
            file,
            metadata: &gguf.metadata,
            prefix: family.architecture,
        };
        for (key, meaning) in family.refused {
            if let Some(found) = keys.optional_u32(key)?.filter(|&found| found != 0) {
                return Err(keys.refuse(key, format!("0 (not {meaning})"), found));
            }
        }
        let (layers, predicting) = layers(&keys)?;
        let mut tensors = Tensors::new(file, gguf, family.architecture, predicting);
        let reader = Reader {
            family,
            keys: &keys,
            shape: Shape::read(&keys)?,
        };
        let model = reader.model(layers, &mut tensors)?;
        tensors.finish()?;
        Ok(model)
    }
}

/// How many layers compute a token, and which layers behind them predict further ones.
fn layers(keys: &Keys<'_>) -> Result<(usize, Range<usize>), ModelError> {
    const PREDICTING: &str = "nextn_predict_layers";
    let all = keys.size("block_count")?;
    match keys.optional_u32(PREDICTING)?.unwrap_or(0) as usize {
        predicting if predicting < all => Ok((all - predicting, all - predicting..all)),
        predicting => Err(keys.refuse(PREDICTING, format!("fewer than {all} layers"), predicting)),
    }
}

/// What makes scores of a state, if the file has it.
fn classifier(tensors: &mut Tensors<'_>, hidden: usize) -> Result<Option<TensorRows>, ModelError> {
    const CLASSIFIER: &str = "cls.output.weight";
    const MOST_SCORES: usize = 1024;
    if !tensors.has(CLASSIFIER) {
        return Ok(None);
    }
    let scores = tensors.rows(CLASSIFIER, hidden, MOST_SCORES)?;
    tensors.matrix(CLASSIFIER, hidden, scores).map(Some)
}

/// Sizes that all layers share.
struct Shape {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    feed_forward: usize,
}

impl Shape {
    fn read(keys: &Keys<'_>) -> Result<Shape, ModelError> {
        let hidden = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = keys.optional_size("attention.head_count_kv")?;
        let kv_heads = kv_heads.unwrap_or(heads);
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of the {heads} query heads");
            return Err(keys.refuse("attention.head_count_kv", expected, kv_heads));
        }
        Ok(Shape {
            hidden,
            heads,
            kv_heads,
            head_dim: head_dim(keys, hidden, heads)?,
            feed_forward: keys.size("feed_forward_length")?,
        })
    }
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected = format!("a divisor of embedding_length {hidden}");
            return Err(keys.refuse("attention.head_count", expected, heads));
        }
    };
    match keys.optional_size("attention.value_length")? {
        Some(length) if length != head_dim => {
            let expected = format!("{head_dim}, the length of a key");
            Err(keys.refuse("attention.value_length", expected, length))
        }
        _ => Ok(head_dim),
    }
}

/// What a model is read by.
struct Reader<'a> {
    family: &'static Family,
    keys: &'a Keys<'a>,
    shape: Shape,
}

impl Reader<'_> {
    fn model(&self, layers: usize, tensors: &mut Tensors<'_>) -> Result<ModelSpec, ModelError> {
        let Reader {
            family,
            keys,
            ref shape,
        } = *self;
        let hidden = shape.hidden;
        let vocabulary = tensors.rows(EMBEDDING, hidden, MAX_SIZE as usize)?;
        let embedding = tensors.matrix(EMBEDDING, hidden, vocabulary)?;
        let output_norm = tensors.vector("output_norm.weight", hidden)?;
        let output = tensors.optional_matrix("output.weight", hidden, vocabulary)?;
        let rope = self.rope(tensors)?;
        let same = AllLayers {
            scale: self.scale(layers)?,
            softcap: self.softcap(family.softcaps.attention, "attn_logit_softcapping")?,
            temperature: self.temperature()?,
            windowed_rope: self.windowed_rope(&rope)?,
            rope,
        };
        let scale = |key| match family.scale_keys {
            true => keys.positive_or_none(key),
            false => Ok(None),
        };
        let logit_divisor = scale("logit_scale")?;
        let pooling = self.pooling()?;
        let classifier = match (pooling, family.classifier) {
            (Pooling::Rank, Presence::IfThere) => classifier(tensors, hidden)?,
            _ => None,
        };
        let windows = self.windows(layers)?;
        let layers = windows.into_iter().enumerate().map(|(index, window)| {
            let mut layer = Layer {
                reader: self,
                same: &same,
                index,
                tensors: &mut *tensors,
            };
            Ok(LayerSpec {
                attention: layer.attention(window)?,
                feed_forward: layer.feed_forward()?,
            })
        });
        Ok(ModelSpec {
            architecture: family.architecture,
            hidden,
            vocabulary,
            context_length: self.context_length()?,
            norm_epsilon: keys.positive("attention.layer_norm_rms_epsilon")?,
            layers: layers.collect::<Result<_, ModelError>>()?,
            output_norm,
            output_head: output.unwrap_or_else(|| embedding.clone()),
            embedding,
            embedding_scale: match family.embedding_scale {
                EmbeddingScale::One => 1.0,
                EmbeddingScale::RootOfWidth => (hidden as f32).sqrt(),
                EmbeddingScale::Key => keys.positive_or_none("embedding_scale")?.unwrap_or(1.0),
            },
            residual_scale: scale("residual_scale")?.unwrap_or(1.0),
            logit_scale: logit_divisor.map_or(1.0, |divisor| 1.0 / divisor),
            logit_softcap: self.softcap(family.softcaps.logits, "final_logit_softcapping")?,
            pooling,
            classifier,
        })
    }

    /// The numbers are llama.cpp's; 0 is none.
    fn pooling(&self) -> Result<Pooling, ModelError> {
        const POOLING: &str = "pooling_type";
        match self.keys.optional_u32(POOLING)? {
            None | Some(0) => Ok(Pooling::default()),
            Some(1) => Ok(Pooling::Mean),
            Some(2) => Ok(Pooling::Cls),
            Some(3) => Ok(Pooling::Last),
            Some(4) => Ok(Pooling::Rank),
            Some(other) => Err(self.keys.refuse(POOLING, "a number from 0 to 4", other)),
        }
    }

    fn context_length(&self) -> Result<usize, ModelError> {
        let trained = self.keys.size("context_length")?;
        let window = self.keys.optional_u32(WINDOW)?;
        Ok(match (self.family.windows, window) {
            (Windows::None, Some(window)) if window > 0 => trained.min(window as usize),
            _ => trained,
        })
    }

    /// The window of each layer.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
        let Windows::Some {
            period, default, ..
        } = self.family.windows
        else {
            return Ok(vec![None; layers]);
        };
        // 0 means none.
        let window = match self.keys.optional_u32(WINDOW)? {
            Some(window) => Some(window as usize).filter(|&window| window > 0),
            None => default,
        };
        let windowed = match self.keys.pattern(PATTERN)? {
            None => all_but_every(period, layers),
            Some(Pattern::Period(period)) => all_but_every(period, layers),
            Some(Pattern::Layers(windowed)) if windowed.len() >= layers => windowed,
            Some(Pattern::Layers(windowed)) => {
                let expected = format!("one for each of {layers} layers");
                return Err(self.keys.refuse(PATTERN, expected, windowed.len()));
            }
        };
        let windows = windowed.into_iter().take(layers);
        Ok(windows
            .map(|windowed| window.filter(|_| windowed))
            .collect())
    }

    /// What scores are multiplied by.
    fn scale(&self, layers: usize) -> Result<f32, ModelError> {
        let Shape {
            hidden,
            heads,
            head_dim,
            ..
        } = self.shape;
        if self.family.scale_keys
            && let Some(scale) = self.keys.positive_or_none("attention.scale")?
        {
            return Ok(scale);
        }
        let width = match self.family.scaled_by_width == Some(layers) {
            true => hidden as f32 / heads as f32,
            false => head_dim as f32,
        };
        Ok(1.0 / width.sqrt())
    }

    fn softcap(&self, softcap: Softcap, key: &str) -> Result<Option<f32>, ModelError> {
        match softcap {
            Softcap::Never => Ok(None),
            Softcap::Key(default) if !self.keys.has(key) => Ok(default),
            Softcap::Key(_) => self.keys.positive_or_none(key),
        }
    }

    fn temperature(&self) -> Result<Option<Temperature>, ModelError> {
        if !self.family.long_context_keys {
            return Ok(None);
        }
        let scale = self.keys.positive_or_none("attention.temperature_scale")?;
        match scale {
            Some(scale) => Ok(Some(Temperature {
                scale,
                positions: self.original_context()?,
            })),
            None => Ok(None),
        }
    }

    fn original_context(&self) -> Result<usize, ModelError> {
        match self.keys.optional_size(ORIGINAL_CONTEXT)? {
            Some(original) => Ok(original),
            None => self.keys.size("context_length"),
        }
    }

    /// The rotation in layers without a window; `None`: no layer is rotated.
    fn rope(&self, tensors: &mut Tensors<'_>) -> Result<Option<Rope>, ModelError> {
        let Reader {
            family,
            keys,
            shape: Shape { head_dim, .. },
        } = *self;
        // In granite, the key says whether there is a rotation at all.
        if family.scale_keys && keys.flag("rope.scaling.finetuned")? == Some(false) {
            return Ok(None);
        }
        let dimensions = keys.optional_size("rope.dimension_count")?;
        let dimensions = dimensions.unwrap_or(head_dim);
        if dimensions > head_dim || dimensions % 2 != 0 {
            let expected = format!("an even number up to {head_dim}, the length of a head");
            return Err(keys.refuse("rope.dimension_count", expected, dimensions));
        }
        let mut rope = Rope {
            pairing: family.rope_pairing,
            dimensions,
            base: keys.positive_or("rope.freq_base", 10_000.0)?,
            factor: 1.0,
            yarn: None,
            // Llama 3.1 and later store their scaling this way.
            divisors: tensors
                .optional_vector("rope_freqs.weight", dimensions / 2)?
                .map(Divisors::Always),
            magnitude: 1.0,
        };
        match keys.text(SCALING)? {
            Some("none") => {}
            None | Some("linear") => {
                let older = keys.positive_or("rope.scale_linear", 1.0)?;
                rope.factor = keys.positive_or("rope.scaling.factor", older)?;
            }
            Some("yarn") => {
                rope.factor = keys.positive("rope.scaling.factor")?;
                rope.yarn = Some(self.yarn()?);
                rope.magnitude = self.yarn_magnitude(rope.factor)?;
            }
            Some("longrope") => {
                let pairs = dimensions / 2;
                rope.divisors = Some(Divisors::ByContext {
                    short: tensors.vector("rope_factors_short.weight", pairs)?,
                    long: tensors.vector("rope_factors_long.weight", pairs)?,
                    original_context: self.original_context()?,
                });
                rope.magnitude = keys.positive_or("rope.scaling.attn_factor", 1.0)?;
            }
            Some(other) => {
                let expected = "none, linear, yarn or longrope, the kinds that prima computes";
                return Err(keys.refuse(SCALING, expected, format!("{other:?}")));
            }
        }
        Ok(Some(rope))
    }

    fn yarn(&self) -> Result<Yarn, ModelError> {
        let beta = |key, default| match self.family.long_context_keys {
            true => self.keys.positive_or(key, default),
            false => Ok(default),
        };
        Ok(Yarn {
            original_context: self.original_context()?,
            beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
        })
    }

    fn yarn_magnitude(&self, factor: f32) -> Result<f32, ModelError> {
        let own = self.keys.positive_or("rope.scaling.attn_factor", 1.0)?;
        let multiplier = match self.family.long_context_keys {
            true => self
                .keys
                .positive_or_none("rope.scaling.yarn_log_multiplier")?,
            false => None,
        };
        // Where the file tells how scores are scaled over all dimensions, sines and cosines have only the rest of it.
        let rest = multiplier.map_or(1.0, |multiplier| 1.0 + 0.1 * multiplier * factor.ln());
        Ok(own * Yarn::magnitude(factor) / rest)
    }

    fn windowed_rope(&self, rope: &Option<Rope>) -> Result<Option<Rope>, ModelError> {
        let (Windows::Some { rope: kind, .. }, Some(rope)) = (self.family.windows, rope) else {
            return Ok(rope.clone());
        };
        let default = match kind {
            WindowedRope::Same => return Ok(Some(rope.clone())),
            WindowedRope::Base(base) => base,
            WindowedRope::Unscaled => rope.base,
        };
        Ok(Some(Rope {
            pairing: rope.pairing,
            dimensions: rope.dimensions,
            base: self.keys.positive_or("rope.freq_base_swa", default)?,
            factor: 1.0,
            yarn: None,
            divisors: None,
            magnitude: 1.0,
        }))
    }
}

/// All layers but the last of every `period`.
fn all_but_every(period: usize, layers: usize) -> Vec<bool> {
    (0..layers)
        .map(|layer| layer % period < period - 1)
        .collect()
}

/// What all layers share beside their sizes.
struct AllLayers {
    scale: f32,
    softcap: Option<f32>,
    temperature: Option<Temperature>,
    rope: Option<Rope>,
    windowed_rope: Option<Rope>,
}

/// The tensors of one layer.
struct Layer<'a, 'b> {
    reader: &'a Reader<'a>,
    same: &'a AllLayers,
    index: usize,
    tensors: &'a mut Tensors<'b>,
}

impl Layer<'_, '_> {
    fn attention(&mut self, window: Option<usize>) -> Result<Attention, ModelError> {
        let Reader {
            family, ref shape, ..
        } = *self.reader;
        let &Shape {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = shape;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let norm = self.pre_norm("attn_norm.weight")?;
        let [query, key, value] = self.queries_keys_values(queries, keys)?;
        let is_rotated = family
            .unrotated
            .is_none_or(|every| !(self.index + 1).is_multiple_of(every));
        let rope = match window {
            Some(_) => &self.same.windowed_rope,
            None => &self.same.rope,
        };
        let norm_lengths = match family.head_norms {
            HeadNormKind::None => None,
            HeadNormKind::EachHead => Some((head_dim, head_dim)),
            HeadNormKind::AllHeads => Some((queries, keys)),
        };
        Ok(Attention {
            norm,
            heads,
            kv_heads,
            head_dim,
            scale: self.same.scale,
            rope: rope.clone().filter(|_| is_rotated),
            temperature: self.same.temperature,
            query,
            key,
            value,
            output: self.projection("attn_output", queries, hidden, family.other_biases)?,
            head_norms: match norm_lengths {
                Some((query, key)) => Some(HeadNorms {
                    query: self.vector("attn_q_norm.weight", query)?,
                    key: self.vector("attn_k_norm.weight", key)?,
                }),
                None => None,
            },
            window,
            softcap: self.same.softcap,
            post_norm: self.post_norm("post_attention_norm.weight")?,
        })
    }

    /// In tensors of their own, or in one.
    fn queries_keys_values(
        &mut self,
        queries: usize,
        keys: usize,
    ) -> Result<[Projection; 3], ModelError> {
        let (hidden, biases) = (
            self.reader.shape.hidden,
            self.reader.family.attention_biases,
        );
        if !self.has("attn_qkv.weight") {
            return Ok([
                self.projection("attn_q", hidden, queries, biases)?,
                self.projection("attn_k", hidden, keys, biases)?,
                self.projection("attn_v", hidden, keys, biases)?,
            ]);
        }
        let parts = [queries, keys, keys];
        let all = self.projection("attn_qkv", hidden, queries + 2 * keys, biases)?;
        let weights = all.weight.split(parts);
        let biases = all.bias.map(|bias| bias.split(parts).map(Some));
        let mut biases = biases.unwrap_or_default().into_iter();
        Ok(weights.map(|weight| Projection {
            weight,
            bias: biases.next().flatten(),
        }))
    }

    fn feed_forward(&mut self) -> Result<FeedForward, ModelError> {
        let Reader {
            family, ref shape, ..
        } = *self.reader;
        let (hidden, width, biases) = (shape.hidden, shape.feed_forward, family.other_biases);
        let norm = self.pre_norm("ffn_norm.weight")?;
        let [gate, up] = match self.has("ffn_gate.weight") {
            true => [
                self.projection("ffn_gate", hidden, width, biases)?,
                self.projection("ffn_up", hidden, width, biases)?,
            ],
            false => {
                let both = self.matrix("ffn_up.weight", hidden, 2 * width)?;
                let both = both.split([width, width]);
                both.map(|weight| Projection { weight, bias: None })
            }
        };
        Ok(FeedForward {
            norm,
            width,
            activation: family.activation,
            gate,
            up,
            down: self.projection("ffn_down", width, hidden, biases)?,
            post_norm: self.post_norm("post_ffw_norm.weight")?,
        })
    }

    fn pre_norm(&mut self, name: &str) -> Result<Option<TensorRows>, ModelError> {
        self.norm(self.reader.family.pre_norms, name)
    }

    fn post_norm(&mut self, name: &str) -> Result<Option<TensorRows>, ModelError> {
        self.norm(self.reader.family.post_norms, name)
    }

    fn norm(&mut self, is_there: bool, name: &str) -> Result<Option<TensorRows>, ModelError> {
        match is_there {
            true => Ok(Some(self.vector(name, self.reader.shape.hidden)?)),
            false => Ok(None),
        }
    }

    fn projection(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
        bias: Presence,
    ) -> Result<Projection, ModelError> {
        let weight = self.matrix(&format!("{name}.weight"), cols, rows)?;
        let bias_name = format!("{name}.bias");
        let has_bias = match bias {
            Presence::Never => false,
            Presence::IfThere => self.has(&bias_name),
            Presence::Always => true,
        };
        Ok(Projection {
            weight,
            bias: match has_bias {
                true => Some(self.vector(&bias_name, rows)?),
                false => None,
            },
        })
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.has(&self.full(name))
    }

    fn matrix(&mut self, name: &str, cols: usize, rows: usize) -> Result<TensorRows, ModelError> {
        let name = self.full(name);
        self.tensors.matrix(&name, cols, rows)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<TensorRows, ModelError> {
        let name = self.full(name);
        self.tensors.vector(&name, length)
    }

    fn full(&self, name: &str) -> String {
        format!("blk.{}.{name}", self.index)
    }
}

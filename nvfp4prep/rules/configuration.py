"""config.json and hf_quant_config.json, and what they say against what is stored."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP201",
        "no-config",
        "error",
        "headers",
        "no config.json",
        why=(
            "config.json says the architecture, the number of experts and the activation. Without it no engine can "
            "build the model."
        ),
        fix="Fetch config.json from where the weights come from.",
        example="error NVP201 [no-config] config.json: not there; nvfp4prep needs the model's config.json",
    ),
    Rule(
        "NVP202",
        "bad-json",
        "error",
        "headers",
        "a JSON file that can't be read",
        why=(
            "The file can't be parsed, or holds what JSON can't carry, so that neither nvfp4prep nor an engine knows "
            "what it says."
        ),
        fix="Repair the file, or fetch it again.",
        example=(
            "error NVP202 [bad-json] config.json: not valid JSON: Expecting ',' delimiter: line 41 column 3 (char 1187)"
        ),
    ),
    Rule(
        "NVP203",
        "no-quant-config",
        "error",
        "headers",
        "no quantisation configuration",
        why=(
            "Engines learn from it that weights are 4-bit. Without it they build the model for 16-bit weights, which "
            "these are not."
        ),
        fix="Put the exporter's hf_quant_config.json back, or quantise the model with NVIDIA ModelOpt.",
        example=(
            "error NVP203 [no-quant-config] config.json: neither a quantization_config in config.json nor "
            "hf_quant_config.json names a quant_algo; quantise it with NVIDIA ModelOpt first"
        ),
    ),
    Rule(
        "NVP204",
        "not-modelopt",
        "error",
        "headers",
        "quantised by something other than ModelOpt",
        why=(
            "Other tools store scales in another way: compressed-tensors stores their reciprocals. Read as ModelOpt's "
            "they would be wrong."
        ),
        fix="Export the model with NVIDIA ModelOpt.",
        example=(
            "error NVP204 [not-modelopt] config.json: quant_method is 'compressed-tensors'; nvfp4prep reads ModelOpt "
            "checkpoints"
        ),
    ),
    Rule(
        "NVP205",
        "quant-config-bad",
        "warning",
        "headers",
        "a quantisation configuration without a usable quant_algo",
        why=(
            "vLLM and SGLang go by config.json, TensorRT-LLM by hf_quant_config.json. The ones that read this file "
            "find no algorithm in it."
        ),
        fix="Run `nvfp4prep convert`, which writes both files from what is stored.",
        example="warning NVP205 [quant-config-bad] hf_quant_config.json: quant_algo is None; ignored",
    ),
    Rule(
        "NVP206",
        "quant-config-missing",
        "info",
        "headers",
        "only one of the two quantisation configurations",
        why=(
            "Most engines do with either file, but not always: SGLang may refuse MIXED_PRECISION with config.json "
            "alone, and vLLM refuses W4A16_NVFP4 with hf_quant_config.json alone."
        ),
        fix="Run `nvfp4prep convert`, which writes both files, equal.",
        example=(
            "info NVP206 [quant-config-missing] hf_quant_config.json: no quantisation config here; config.json's is "
            "used"
        ),
    ),
    Rule(
        "NVP207",
        "configs-disagree",
        "warning",
        "headers",
        "config.json and hf_quant_config.json differ",
        why=(
            "vLLM and SGLang go by config.json, TensorRT-LLM by hf_quant_config.json, so that they take the same "
            "checkpoint for different ones."
        ),
        fix="Correct config.json if it is the wrong one, then run `nvfp4prep convert`, which writes both files equal.",
        example="warning NVP207 [configs-disagree] config.json: KV cache: None here, FP8 in hf_quant_config.json",
    ),
    Rule(
        "NVP208",
        "algo-contradicts-weights",
        "error",
        "headers",
        "quant_algo is not what is stored",
        why=(
            "Engines choose parameters and kernels by quant_algo. Those of another algorithm do not fit the stored "
            "tensors."
        ),
        fix="Correct quant_algo in both configuration files, or export the checkpoint again.",
        example=(
            "error NVP208 [algo-contradicts-weights] config.json: quant_algo is FP8, but 18624 linears are stored as "
            "NVFP4; correct quant_algo"
        ),
    ),
    Rule(
        "NVP209",
        "nothing-to-convert",
        "error",
        "headers",
        "no quantised weight is stored",
        why=(
            "There is no 4-bit weight whose scales could be checked or converted. The configuration may be left from "
            "another export."
        ),
        fix="Quantise the model with NVIDIA ModelOpt, or give the checkpoint that was quantised.",
        example="error NVP209 [nothing-to-convert] no NVFP4 weight is stored, whatever the config says (NVFP4)",
    ),
    Rule(
        "NVP210",
        "no-input-scales",
        "warning",
        "headers",
        "W4A4 by the configuration, but no input_scale is stored",
        why=(
            "Kernels that quantise activations have no input_scale to go by: vLLM uses uninitialised memory, SGLang "
            "1.0, and TensorRT-LLM refuses. Marlin, which reads none, is right."
        ),
        fix="Run `nvfp4prep convert`, which declares the checkpoint weight-only, or calibrate again for W4A4.",
        example=(
            "warning NVP210 [no-input-scales] config.json: quant_algo is NVFP4, but no input_scale is stored: written "
            "as W4A16_NVFP4, for weight-only kernels"
        ),
    ),
    Rule(
        "NVP211",
        "group-size",
        "error",
        "headers",
        "group_size is not what is stored",
        why=(
            "A scale belongs to group_size inputs. Read with another size, scales do not fit their weight or reach the "
            "wrong values."
        ),
        fix=(
            "NVFP4: run `nvfp4prep convert`, which writes its group size of 16. int4: correct group_size in both "
            "configuration files if all linears are stored alike, or export again with one group size that divides all "
            "inputs."
        ),
        example="warning NVP211 [group-size] config.json: group_size is 32, the stored block scales have 16; corrected",
        mildest="warning",
    ),
    Rule(
        "NVP212",
        "quantized-layers-missing",
        "warning",
        "headers",
        "MIXED_PRECISION without quantized_layers",
        why=(
            "Nothing says which linear has which format. vLLM and TensorRT-LLM refuse, and SGLang takes the checkpoint "
            "for another format (w4afp8)."
        ),
        fix="Run `nvfp4prep convert`, which lists every quantised linear by name.",
        example=(
            "warning NVP212 [quantized-layers-missing] config.json: MIXED_PRECISION without quantized_layers; written "
            "anew from what is stored"
        ),
    ),
    Rule(
        "NVP213",
        "nvfp4-awq",
        "warning",
        "headers",
        "NVFP4_AWQ, which few engines compute right",
        why=(
            "vLLM refuses the algorithm. SGLang drops pre_quant_scale on experts, which then compute wrong; "
            "TensorRT-LLM reads it for gate and up only."
        ),
        fix=(
            "Export again without AWQ, or fold the factors away with `--target compressed-tensors --pre-quant-scale "
            "fold`."
        ),
        example=(
            "warning NVP213 [nvfp4-awq] config.json: quant_algo NVFP4_AWQ: vLLM refuses it, and SGLang ignores "
            "pre_quant_scale on experts, which then compute wrong"
        ),
    ),
    Rule(
        "NVP214",
        "exclude-contradicted",
        "warning",
        "headers",
        "an exclude entry that hits modules stored quantised",
        why="Engines build excluded modules for 16-bit weights. The stored 4-bit ones do not fit, and loading stops.",
        fix="Run `nvfp4prep convert`, which names what is stored unquantised, and nothing else.",
        example=(
            "warning NVP214 [exclude-contradicted] config.json: 'model.layers.1*' excludes 4240 modules stored "
            "quantised (model.layers.1.mlp.experts); convert drops it"
        ),
    ),
    Rule(
        "NVP215",
        "exclude-added",
        "warning",
        "headers",
        "modules stored unquantised that the exclude list does not name",
        why=(
            "Engines build a linear that is not excluded for 4-bit weights, and stop at the shape of a 16-bit one. "
            "Routers and embeddings are harmless where the model's code never quantises them."
        ),
        fix="Run `nvfp4prep convert`, which lists these modules by name.",
        example=(
            "warning NVP215 [exclude-added] config.json: 49 modules stored unquantised that the exclude list does not "
            "name; convert lists them: 'model.embed_tokens', 'model.layers.0.mlp.gate', 'model.layers.1.mlp.gate' and "
            "46 more"
        ),
    ),
    Rule(
        "NVP216",
        "exclude-unmatched",
        "info",
        "headers",
        "an exclude entry that matches nothing",
        why="The entry does nothing. It may be a leftover, or the misspelt name of a module that should be excluded.",
        fix="Look whether another name was meant; `nvfp4prep convert` drops the entry.",
        example=(
            "info NVP216 [exclude-unmatched] config.json: 1 entry of the exclude list matches no stored module; "
            "convert drops it: 'model.layers.61*'"
        ),
    ),
    Rule(
        "NVP217",
        "exclude-corrupted",
        "warning",
        "headers",
        "an exclude entry that is no text",
        why=(
            "The entry matches nothing in any engine, so that its module passes for quantised: Nemotron-H's lm_head is "
            "then built as NVFP4."
        ),
        fix="Run `nvfp4prep convert`, which drops the entry and lists what is stored unquantised.",
        example=(
            "warning NVP217 [exclude-corrupted] config.json: 5 corrupted entries of the exclude list; convert drops "
            r"them: 'lm_head.\x00backbone.pt_name_sentinel', 'backbone.embeddings.\x00backbone.pt_name_sentinel', "
            r"'backbone.layers.0.mixer.conv1d.\x00backbone.pt_name_sentinel' and 2 more"
        ),
    ),
    Rule(
        "NVP218",
        "exclude-pattern",
        "warning",
        "headers",
        "an exclude entry that is no usable pattern",
        why=(
            "Engines know names and globs in a ModelOpt list, no regular expressions (`re:`), so that the entry "
            "excludes nothing."
        ),
        fix="Run `nvfp4prep convert`, which drops the entry and lists what is stored unquantised.",
        example=(
            "warning NVP218 [exclude-pattern] config.json: 1 entry of the exclude list is no pattern that can be "
            "matched; convert drops it: 're:('"
        ),
    ),
    Rule(
        "NVP219",
        "exclude-nameless",
        "warning",
        "headers",
        "an unquantised module without a name",
        why=(
            "It can't be listed: vLLM looks for an entry anywhere in a module's name, and finds the empty one in all "
            "of them."
        ),
        fix="Rename the tensor, or remove it if it is not part of the model.",
        example=(
            "warning NVP219 [exclude-nameless] weight: this tensor's module has no name, and an empty entry would "
            "exclude every module: not listed"
        ),
    ),
    Rule(
        "NVP220",
        "exclude-substring",
        "warning",
        "headers",
        "an exclude entry that vLLM takes for a longer name",
        why=(
            "vLLM looks for an entry anywhere in a module's name: `mlp.gate` is also a part of `mlp.gate_up_proj`, "
            "which is then built for 16-bit weights that are not stored."
        ),
        fix=(
            "Export again with that linear unquantised, or serve with another engine: no spelling of the entry avoids "
            "it."
        ),
        example=(
            "warning NVP220 [exclude-substring] config.json: vLLM takes an entry of the exclude list for "
            "'model.layers.0.mlp.gate_up_proj' too, which is quantised (1 in all)"
        ),
    ),
    Rule(
        "NVP221",
        "exclude-tail",
        "warning",
        "headers",
        "an exclude entry that SGLang takes for all layers",
        why=(
            "SGLang compares entries that end in one of MLA's projections with modules of every layer. Quantised ones "
            "are then built for 16-bit weights that are not stored."
        ),
        fix="Export again with MLA's projections quantised in all layers or in none, or serve with another engine.",
        example=(
            "warning NVP221 [exclude-tail] config.json: SGLang takes an entry of the exclude list for "
            "'model.layers.1.self_attn.q_b_proj' too, which is quantised (57 in all)"
        ),
    ),
    Rule(
        "NVP222",
        "mtp-missing",
        "warning",
        "headers",
        "config.json promises MTP layers that are not stored",
        why="Speculative decoding with the model's own MTP layers has no weights to load.",
        fix="Take the layers from the original model, or serve without speculative decoding.",
        example=(
            "warning NVP222 [mtp-missing] config.json: num_nextn_predict_layers is 1, but no such layer is stored; "
            "serve without speculative decoding, or set it to 0"
        ),
    ),
    Rule(
        "NVP223",
        "layers-missing",
        "error",
        "headers",
        "fewer layers are stored than config.json says",
        why="Engines build as many layers as config.json says, and have no weights for these.",
        fix="Fetch the missing shards, or correct num_hidden_layers.",
        example=(
            "error NVP223 [layers-missing] config.json: num_hidden_layers is 48, 2 are not stored (layers 46 and "
            "above); fetch the missing shards, or correct config.json"
        ),
    ),
    Rule(
        "NVP224",
        "lm-head-missing",
        "warning",
        "headers",
        "no lm_head, and it is not tied to the embedding",
        why="By config.json the model has an lm_head of its own, and engines have no weights for it.",
        fix="Fetch the shard that holds lm_head, or set tie_word_embeddings to true if it is the embedding.",
        example=(
            "warning NVP224 [lm-head-missing] config.json: tie_word_embeddings is false, but no lm_head is stored; "
            "fetch the shard that holds it"
        ),
    ),
    Rule(
        "NVP225",
        "config-shape",
        "warning",
        "headers",
        "sizes in config.json are not those of the tensors",
        why=(
            "Engines size their parameters by config.json. Tensors of other sizes do not fit, or are read past their "
            "end."
        ),
        fix="Correct config.json, or fetch it from the revision that the weights are of.",
        example=(
            "warning NVP225 [config-shape] config.json: intermediate size is 768 by config.json, 512 in the experts of "
            "layers 0-47; engines size their buffers by config.json"
        ),
    ),
    Rule(
        "NVP226",
        "experts-unquantized",
        "warning",
        "headers",
        "expert bytes that are not packed under a 4-bit configuration",
        why=(
            "Experts hold most of a MoE model's bytes. In 16 bits they take 3.6 times the memory of NVFP4, and no FP4 "
            "kernel is used for them."
        ),
        fix="Export again with all experts quantised, and look which pattern of the quantisation recipe left them out.",
        example=(
            "warning NVP226 [experts-unquantized] model.layers.24.mlp.experts.0.down_proj.weight, "
            "model-00003-of-00004.safetensors: 22% of the expert bytes are packed; 24 of 48 MoE layers are 16-bit "
            "(24-47)"
        ),
        mildest="info",
    ),
    Rule(
        "NVP227",
        "shared-expert-unquantized",
        "info",
        "headers",
        "a 16-bit shared expert beside quantised routed experts",
        why=(
            "An engine that computes the shared expert in one kernel with the routed ones can't do so when their "
            "formats differ."
        ),
        fix="Switch off the engine's fusion of shared experts.",
        example=(
            "info NVP227 [shared-expert-unquantized] model.layers.3.mlp.shared_experts.down_proj.weight, "
            "model-00001-of-00004.safetensors: the shared experts of layers 3-60 are 16-bit; engines can't fuse them "
            "with the routed"
        ),
    ),
    Rule(
        "NVP228",
        "layer-incomplete",
        "warning",
        "headers",
        "a layer without tensors that other layers of its kind have",
        why=(
            "A loader that does not count what it has loaded leaves the parameter as it was allocated, and the model "
            "answers with garbage."
        ),
        fix="Fetch the shard that holds the tensors, or export again; ignore it where the model's layers differ so.",
        example=(
            "warning NVP228 [layer-incomplete] layer 3, model.layers.3.input_layernorm.weight: layer 3 of model.layers "
            "lacks what other layers have: input_layernorm.weight; fetch the whole checkpoint, or export it again"
        ),
    ),
)

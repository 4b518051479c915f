"use strict";
// Words of the page in English and Chinese. Names of metrics that are not here are shown as they are in the files.
const WORDS = {
  curves: ["Curves", "曲线"], ranks: ["Ranks", "各 rank"], timeline: ["Timeline", "时间线"], samples: ["Samples", "文本样例"], about: ["About the run", "关于这次训练"],
  runs: ["Runs", "训练"], language: ["中文", "English"], light: ["Light", "浅色"], dark: ["Dark", "深色"], system: ["Auto", "自动"],
  theme_hint: ["Colours: automatic, light or dark", "颜色：自动、浅色或深色"],
  live: ["live", "实时"], lost_page: ["not connected", "未连接"], report: ["report", "报告"], paused: ["paused", "已暂停"], reading: ["reading", "读取中"],
  step: ["step", "步"], steps: ["steps", "步"], tokens: ["tokens", "token"], time: ["time", "时间"], smoothing: ["Smoothing", "平滑"], log: ["log", "对数"], reset: ["Reset zoom", "还原缩放"],
  loss: ["Loss", "损失"], train: ["training", "训练"], valid_loss: ["Held-out loss", "验证损失"], held_out: ["held-out", "验证"], lr: ["Learning rate", "学习率"], grad_norm: ["Gradient norm", "梯度范数"],
  tokens_per_s: ["Tokens per second", "每秒 token 数"], samples_per_s: ["Samples per second", "每秒样本数"], mfu: ["MFU", "MFU"], peak_memory_bytes: ["Peak memory", "峰值内存"], skipped_steps: ["Skipped steps", "跳过的步"],
  perplexity: ["Perplexity", "困惑度"], bits_per_byte: ["Bits per byte", "每字节比特数"],
  progress: ["Step", "步数"], of: ["of", "/"], best: ["best", "最好"], eta: ["left", "剩余"], memory: ["Peak memory", "峰值内存"], goodput: ["Useful time", "有效时间"], speed: ["Tokens/s", "token/秒"], samples_speed: ["Samples/s", "样本/秒"],
  state_running: ["running", "运行中"], state_restarting: ["restarting", "重启中"], state_finished: ["finished", "已完成"], state_stopped: ["stopped", "已停止"], state_failed: ["failed", "失败"], state_lost: ["lost", "已丢失"], state_new: ["new", "未开始"],
  no_runs: ["No runs here yet. Start one with: drumline train", "这里还没有训练。用 drumline train 开始一次"], no_records: ["No records yet.", "还没有记录。"], no_evaluation: ["no evaluation yet", "还没有评估"],
  no_ranks: ["This run has no records of its ranks (ranks.jsonl).", "这次训练没有各 rank 的记录（ranks.jsonl）。"], no_events: ["No events yet.", "还没有事件。"], no_samples: ["No samples yet: the model writes one at each evaluation.", "还没有文本样例：每次评估时模型会写一段。"],
  no_times: ["The records of this run have no times, so it is not known where its time went.", "这次训练的记录没有时间，因此不知道时间花在了哪里。"], no_data: ["The run does not say which data it has.", "这次训练没有说明所用的数据。"], no_checkpoint: ["No checkpoint yet.", "还没有检查点。"],
  why_step: ["Why step", "为什么是这样：第"], differences: ["Differing settings", "不同的设置"], no_differences: ["The settings of these runs are the same.", "这些训练的设置相同。"],
  busy_over_time: ["Busy time of a step, without waiting, over the run", "每步的忙碌时间（不含等待），随训练进行"], last_step: ["A step now, in phases", "最近一步的各阶段"], rank: ["rank", "rank"], host: ["host", "主机"], ranks_n: ["ranks", "个 rank"], hosts_n: ["hosts", "台主机"], per_row: ["ranks per row, the slowest shown", "个 rank 一行，显示最慢的"],
  median: ["× median", "× 中位数"], slow_ranks: ["Slower than the others", "比其他慢"], busy: ["busy", "忙碌"], faster: ["faster", "较快"], slower: ["slower", "较慢"], typical: ["typical", "典型"], and_more: ["more", "更多"],
  data: ["data", "数据"], forward: ["forward", "前向"], backward: ["backward", "反向"], wait: ["wait", "等待"], optimizer: ["optimizer", "优化器"], save: ["save", "保存"], other: ["other", "其他"], compute: ["compute", "计算"],
  useful: ["useful steps", "有效的步"], startup: ["start-up", "启动"], again: ["computed again", "重新计算"], down: ["down", "停机"], evaluation: ["evaluation", "评估"], stalls: ["saves and snapshots", "保存与快照"],
  was_useful: ["of the time was useful steps", "的时间是有效的步"], in_total: ["in total", "总计"], starts: ["starts", "次启动"],
  lane_run: ["training", "训练"], lane_eval: ["evaluation", "评估"], lane_save: ["saves", "保存"], lane_trouble: ["trouble", "问题"],
  all_events: ["all", "全部"], stacks: ["stacks and cause", "堆栈与原因"], stall: ["stall", "停顿"], world: ["ranks", "个 rank"], show_all: ["Show all", "全部显示"],
  run: ["Run", "训练"], environment: ["Environment", "环境"], data_card: ["Data", "数据"], model_card: ["Model", "模型"], config: ["Config", "配置"], tasks: ["Task results", "任务结果"], make_again: ["Make it again", "重新训练"],
  folder: ["folder", "文件夹"], state: ["state", "状态"], updated: ["updated", "更新于"], cause: ["cause", "原因"], started: ["started", "开始于"], device: ["device", "设备"], world_size: ["ranks", "rank 数"], hosts: ["hosts", "主机"], weights: ["weights", "权重"], weights_sha256: ["weights sha256", "权重 sha256"],
  source: ["source", "来源"], documents: ["documents", "文档"], vocabulary: ["vocabulary", "词表"], text: ["text", "文本"], training_split: ["training", "训练"], valid_split: ["held out", "验证"], sha256: ["sha256", "sha256"], excerpts: ["From its documents", "文档摘录"], gone: ["The tokens are not on this machine.", "token 不在这台机器上。"],
  part: ["part", "部分"], parameters: ["parameters", "参数"], gradients: ["gradients", "梯度"], total: ["total", "合计"], layers: ["layers", "层"], at_step: ["at step", "在第"], no_config: ["No config.", "没有配置。"], prompt: ["prompt", "提示"],
  versions: ["versions", "版本"], task: ["task", "任务"], metric: ["metric", "指标"], value: ["value", "值"], items: ["items", "条数"], made: ["Made by drumline report", "由 drumline report 生成"], from_files: ["Read from run folders on this machine. Nothing is sent anywhere.", "读取自本机的训练文件夹，不向任何地方发送数据。"], zoom_hint: ["Drag to zoom, double-click to reset", "拖动缩放，双击还原"],
};
// Events as files name them.
const EVENT_WORDS = {
  started: "开始", resumed: "恢复", restart: "重启", snapshot: "快照", saved: "检查点", "save failed": "保存失败", "snapshots off": "快照已关闭", stalled: "停顿", skipped: "跳过一步", "not finite": "非有限值", "computed again": "重新计算",
  "loss spike": "损失突增", rollback: "回滚", "replica drift": "副本不一致", straggler: "慢 rank", "straggler over": "慢 rank 恢复", finished: "完成", stopped: "停止", failed: "失败", evaluation: "评估",
};
const memory = {
  get(name) { try { return localStorage.getItem("drumline." + name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem("drumline." + name, value); } catch { /* a browser that keeps nothing */ } },
};
let language = memory.get("language") || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
const t = (key) => (WORDS[key] ? WORDS[key][language === "zh" ? 1 : 0] : key);
const known = (key) => key in WORDS;
const eventName = (name) => (language === "zh" && Object.hasOwn(EVENT_WORDS, name) ? EVENT_WORDS[name] : name);
const metricName = (name) => (Object.hasOwn(WORDS, name) ? t(name) : name.replaceAll("_", " "));

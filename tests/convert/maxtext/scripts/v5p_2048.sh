bash MaxText/configs/v5p/gpt3_175b/gpt3_175b_base.sh wide 2 save_dot_except_mlpwi 8 16 8
